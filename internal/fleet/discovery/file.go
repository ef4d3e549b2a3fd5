package discovery

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/textfile"
)

// Bounds of the file.
const (
	maxFile  = 1 << 20                // bytes
	fileLook = 500 * time.Millisecond // between looks at it
)

// workersKept says, in messages, that a failing source changes nothing.
const workersKept = "the workers are kept"

// fileSource reads the workers from a file. It polls the file, which is small: change
// notifications miss some changes (a mounted ConfigMap is a link to a link).
type fileSource struct {
	path    string
	every   time.Duration
	trouble trouble
	noted   func(failed bool)
	list    []kv.Worker
	used    []byte // the content of list
	seen    []byte // the content read last
}

// openFile reads the file for the first time. noted is called with the result of each
// later reading: whether it failed.
func openFile(path string, noted func(failed bool), log *slog.Logger) (*fileSource, error) {
	f := &fileSource{path: path, every: fileLook, trouble: trouble{log: log, what: "--discovery file:" + path}, noted: noted}
	var err error
	if f.used, err = textfile.Read(path, maxFile); err == nil {
		f.list, err = parseFile(f.used)
	}
	if err != nil {
		return nil, fmt.Errorf("--discovery file:%s: %w", path, err)
	}
	return f, nil
}

// Watch sends the workers of the file.
func (f *fileSource) Watch(ctx context.Context) <-chan []kv.Worker {
	return startWatch(ctx, func(send func([]kv.Worker) bool) {
		for more := send(f.list); more && sleep(ctx, f.every); {
			if f.look() {
				more = send(f.list)
			}
		}
	})
}

// look reads the file and reports whether the list has changed. A content counts once
// two reads return it: the first may have met a file that was being written.
func (f *fileSource) look() (changed bool) {
	defer func() { f.noted(f.trouble.now != "") }()
	data, err := textfile.Read(f.path, maxFile)
	switch {
	case err != nil:
		f.trouble.is(err, workersKept)
		return false
	case bytes.Equal(data, f.used):
		f.seen = data
		f.trouble.over()
		return false
	case !bytes.Equal(data, f.seen):
		f.seen = data
		return false
	}
	list, err := parseFile(data)
	if err != nil {
		f.trouble.is(err, workersKept)
		return false
	}
	f.trouble.over()
	f.used, f.list = data, list
	return true
}

// fileWorker is one entry of the file.
type fileWorker struct {
	URL       string       `yaml:"url"`
	Name      string       `yaml:"name"`
	KVEvents  string       `yaml:"kv-events"`
	Replay    string       `yaml:"replay"`
	Load      string       `yaml:"load"`
	Role      kv.Role      `yaml:"role"`
	Kind      kv.Kind      `yaml:"kind"`
	Bootstrap kv.Bootstrap `yaml:"bootstrap"`
	P2P       kv.Bootstrap `yaml:"p2p"`
	Draining  bool         `yaml:"draining"`
}

// UnmarshalYAML reads an entry, which may be a bare URL.
func (w *fileWorker) UnmarshalYAML(decode func(any) error) error {
	if err := decode(&w.URL); err == nil {
		return nil
	}
	type plain fileWorker
	return decode((*plain)(w))
}

// parseFile reads the workers of a file. An error names its line.
func parseFile(data []byte) (_ []kv.Worker, err error) {
	defer func() {
		if p := recover(); p != nil { // of the decoder
			err = fmt.Errorf("it is not valid YAML: %.100q", fmt.Sprint(p))
		}
	}()
	var content struct {
		Workers *[]fileWorker `yaml:"workers"`
	}
	if err := textfile.BoundYAML(data, 16*maxWorkers); err != nil {
		return nil, err
	}
	if err := yaml.UnmarshalWithOptions(data, &content, yaml.Strict()); err != nil {
		if yaml.Unmarshal(data, new([]any)) == nil {
			return nil, errors.New("the list is not below the key workers: begin the file with workers: on a line of its own")
		}
		message, _, _ := strings.Cut(yaml.FormatError(err, false, false), "\n")
		return nil, errors.New(message)
	}
	if content.Workers == nil {
		return nil, errors.New("the list workers: is missing (for no workers, use workers: [])")
	}
	if len(*content.Workers) > maxWorkers {
		return nil, fmt.Errorf("it has %d workers, the maximum is %d", len(*content.Workers), maxWorkers)
	}
	list, ids := []kv.Worker{}, map[uint64]bool{}
	for i, entry := range *content.Workers {
		w, err := entry.worker()
		if err == nil && ids[w.ID] {
			err = fmt.Errorf("%s is given twice", w.URL)
		}
		if err != nil {
			return nil, fmt.Errorf("%sworker %d of the list: %w", lineOf(data, i), i+1, err)
		}
		ids[w.ID] = true
		list = append(list, w)
	}
	return byName(list), nil
}

// lineOf names the line of an entry.
func lineOf(data []byte, entry int) string {
	path, err := yaml.PathString(fmt.Sprintf("$.workers[%d]", entry))
	if err != nil {
		return ""
	}
	node, err := path.ReadNode(bytes.NewReader(data))
	if err != nil || node.GetToken() == nil {
		return ""
	}
	return fmt.Sprintf("line %d: ", node.GetToken().Position.Line)
}

// worker checks the entry.
func (w fileWorker) worker() (kv.Worker, error) {
	if w.URL == "" {
		return kv.Worker{}, errors.New("url is missing; set url: http://host:port")
	}
	base, err := kv.ParseURL(w.URL)
	if err != nil {
		return kv.Worker{}, fmt.Errorf("url: %w", err)
	}
	for _, end := range []struct{ field, value string }{{"kv-events", w.KVEvents}, {"replay", w.Replay}, {"load", w.Load}} {
		if end.value == "" {
			continue
		}
		if strings.HasPrefix(end.value, "ipc:") {
			return kv.Worker{}, fmt.Errorf("%s: ipc endpoints are allowed with --worker only: use tcp://host:5557", end.field)
		}
		if _, err := kv.ParseEndpoint(end.value); err != nil {
			return kv.Worker{}, fmt.Errorf("%s: %w", end.field, err)
		}
	}
	if len(w.Name) > maxName {
		return kv.Worker{}, fmt.Errorf("name has %d bytes, the maximum is %d", len(w.Name), maxName)
	}
	found := kv.Worker{
		ID: idOf(base), Name: cmp.Or(plainName(w.Name), hostPort(base)), URL: base, KVEvents: w.KVEvents, Replay: w.Replay, Load: w.Load,
		EventsPort: eventsPort,
		Disagg:     kv.Disagg{Role: w.Role, Kind: w.Kind, Bootstrap: w.Bootstrap, P2P: w.P2P},
	}
	if w.Draining {
		found.Cordon = kv.CordonDraining
	}
	return found, nil
}

// hostPort is the host and port of a URL as a name.
func hostPort(base string) string {
	if u, err := url.Parse(base); err == nil && u.Host != "" {
		return plainName(u.Host)
	}
	return plainName(base)
}

// baseURL is the URL of the server at an address.
func baseURL(host string, port uint16) string {
	return "http://" + net.JoinHostPort(host, fmt.Sprint(port))
}
