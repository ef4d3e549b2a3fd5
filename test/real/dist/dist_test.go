package dist

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"debug/elf"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// distFolder is where `make dist` puts what is given away.
const distFolder = "out/dist"

// distArchitectures are those that `make dist` may build, by the names of Go.
var distArchitectures = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// needsDist skips a test of what `make dist` has built where nobody asks for it.
func needsDist(t *testing.T) {
	t.Helper()
	if os.Getenv("KVROUTER_DIST") == "" {
		t.Skip("make test-dist runs it")
	}
}

// eachBinary calls test for each binary that was built; there is one at least, that
// of this machine.
func eachBinary(t *testing.T, test func(t *testing.T, arch, path string)) {
	t.Helper()
	needsDist(t)
	for arch := range distArchitectures {
		path := filepath.Join(distFolder, "kvrouter-linux-"+arch)
		if _, err := os.Stat(path); err == nil || arch == runtime.GOARCH {
			t.Run(arch, func(t *testing.T) { test(t, arch, path) })
		}
	}
}

// output returns what a program prints.
func output(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		t.Fatalf("%s %v: %v: %s", name, args, err, failed.Stderr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

func TestDistSumsAreThoseOfTheFiles(t *testing.T) {
	needsDist(t)
	list, err := os.ReadFile(filepath.Join(distFolder, "SHA256SUMS"))
	if err != nil {
		t.Fatal(err)
	}
	var told []string
	for line := range strings.Lines(string(list)) {
		sum, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		file, err := os.Open(filepath.Join(distFolder, name))
		if err != nil {
			t.Fatal(err)
		}
		hash := sha256.New()
		_, err = io.Copy(hash, file)
		_ = file.Close()
		if err != nil || hex.EncodeToString(hash.Sum(nil)) != sum {
			t.Errorf("%s: another sum (%v)", name, err)
		}
		told = append(told, name)
	}
	for _, want := range []string{
		"kvrouter-linux-" + runtime.GOARCH, "kvrouter-" + runtime.GOARCH + ".cdx.json", "kvrouter.1", "kvrouter.service", "compose.yaml",
		"completions/kvrouter.bash", "completions/_kvrouter", "completions/kvrouter.fish",
	} {
		if !slices.Contains(told, want) {
			t.Errorf("there is no %s", want)
		}
	}
}

func TestDistBinariesAskForNothingAndTellTheirCommit(t *testing.T) {
	eachBinary(t, func(t *testing.T, arch, path string) {
		file, err := elf.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = file.Close() }()
		if file.Machine != distArchitectures[arch] {
			t.Errorf("it is for %v", file.Machine)
		}
		for _, part := range file.Progs {
			if part.Type == elf.PT_INTERP || part.Type == elf.PT_DYNAMIC && arch == runtime.GOARCH {
				t.Errorf("it has a part %v: it is not static", part.Type)
			}
		}
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		known := map[string]string{}
		for _, s := range info.Settings {
			known[s.Key] = s.Value
		}
		commit := output(t, "git", "rev-parse", "HEAD")
		if known["vcs.revision"] != commit || known["vcs.modified"] != "false" || known["vcs.time"] == "" || !strings.HasPrefix(info.Main.Version, "v") {
			t.Errorf("built from %s of %s, modified %s, as version %s; the commit is %s", known["vcs.revision"], known["vcs.time"], known["vcs.modified"], info.Main.Version, commit)
		}
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		home, err := os.UserHomeDir()
		if err != nil {
			t.Fatal(err)
		}
		here, err := os.Getwd()
		if err != nil {
			t.Fatal(err)
		}
		for _, private := range []string{here + "/", home + "/."} {
			if at := bytes.Index(content, []byte(private)); at >= 0 {
				t.Errorf("it names a path of who built it: %q", content[at:min(at+80, len(content))])
			}
		}
		if arch == runtime.GOARCH {
			if text := output(t, path, "version"); !strings.Contains(text, info.Main.Version) || !strings.Contains(text, commit) || text != output(t, path, "--version") {
				t.Errorf("version prints %q, --version %q", text, output(t, path, "--version"))
			}
		}
		t.Logf("%s: %.1f MB", path, float64(len(content))/1e6)
	})
}

func TestDistBillNamesWhatIsLinkedIn(t *testing.T) {
	eachBinary(t, func(t *testing.T, arch, path string) {
		text, err := os.ReadFile(filepath.Join(distFolder, "kvrouter-"+arch+".cdx.json"))
		if err != nil {
			t.Fatal(err)
		}
		var bill struct {
			Format     string `json:"bomFormat"`
			Components []struct {
				Purl     string
				Licenses []any
				Hashes   []any
			}
		}
		if err := json.Unmarshal(text, &bill); err != nil || bill.Format != "CycloneDX" {
			t.Fatal(err, bill.Format)
		}
		var found []string
		for _, c := range bill.Components {
			if slices.Contains(found, c.Purl) {
				t.Errorf("%s is there twice", c.Purl)
			}
			found = append(found, c.Purl)
			if strings.HasPrefix(c.Purl, "pkg:cargo/") && (len(c.Licenses) == 0 || len(c.Hashes) == 0) {
				t.Errorf("%s: no licence or no checksum", c.Purl)
			}
		}
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, module := range info.Deps {
			if want := "pkg:golang/" + module.Path + "@" + module.Version; !slices.Contains(found, want) {
				t.Errorf("%s is missing", want)
			}
		}
		for _, want := range []string{"pkg:cargo/tokenizers@", "pkg:cargo/fastokens@", "pkg:cargo/minijinja@", "pkg:golang/std@", "pkg:generic/glibc@"} {
			if !slices.ContainsFunc(found, func(purl string) bool { return strings.HasPrefix(purl, want) }) {
				t.Errorf("%s... is missing", want)
			}
		}
		if slices.ContainsFunc(found, func(purl string) bool { return strings.HasPrefix(purl, "pkg:cargo/windows") }) {
			t.Error("crates of other systems are there")
		}
	})
}

// TestDistImageServesByItself unpacks the image of this machine and runs what it
// says, as the user that it says, with nothing but its files in sight.
func TestDistImageServesByItself(t *testing.T) {
	needsDist(t)
	if os.Getuid() != 0 {
		t.Skip("buildah mount and chroot want root")
	}
	archive, err := filepath.Abs(filepath.Join(distFolder, "kvrouter-image-"+runtime.GOARCH+".tar"))
	if err != nil {
		t.Fatal(err)
	}
	store := t.TempDir()
	buildah := func(args ...string) string {
		return output(t, "buildah", append([]string{"--root", filepath.Join(store, "all"), "--runroot", filepath.Join(store, "run"), "--storage-driver", "vfs"}, args...)...)
	}
	container := buildah("from", "docker-archive:"+archive)
	root := buildah("mount", container)
	defer buildah("umount", container)
	var image struct {
		OCIv1 struct {
			Architecture string
			Config       struct {
				User       string
				Entrypoint []string
				Env        []string
				Labels     map[string]string
			}
		}
	}
	if err := json.Unmarshal([]byte(buildah("inspect", container)), &image); err != nil {
		t.Fatal(err)
	}
	config := image.OCIv1.Config
	if config.User != "65532:65532" || image.OCIv1.Architecture != runtime.GOARCH || config.Labels["org.opencontainers.image.revision"] == "" {
		t.Errorf("the image is of %s, its user %q, its labels %v", image.OCIv1.Architecture, config.User, config.Labels)
	}
	var files []string
	var size int64
	err = filepath.WalkDir(root, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		size += info.Size()
		files = append(files, strings.TrimPrefix(path, root))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"/etc/passwd", "/etc/ssl/certs/ca-certificates.crt", "/kvrouter", "/var/lib/kvrouter/README"}; !slices.Equal(files, want) {
		t.Errorf("in it are %v, want %v", files, want)
	}
	packed, err := os.Stat(archive)
	if err != nil {
		t.Fatal(err)
	}
	if t.Logf("the image has %.1f MB, packed %.1f MB", float64(size)/1e6, float64(packed.Size())/1e6); size >= 70e6 {
		t.Error("that is too much")
	}

	user := &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: 65532, Gid: 65532}, Pdeathsig: syscall.SIGKILL}
	answersPing(t, config.Env, user, config.Entrypoint[0], "--index-snapshot=/var/lib/kvrouter/index")
	if _, err := os.Stat(filepath.Join(root, "var/lib/kvrouter/index")); err != nil {
		t.Errorf("it has not kept its index: %v", err)
	}
}

// TestDistBinaryOfAnotherMachineServes runs the foreign binary under QEMU, where that
// is installed.
func TestDistBinaryOfAnotherMachineServes(t *testing.T) {
	eachBinary(t, func(t *testing.T, arch, path string) {
		if arch == runtime.GOARCH {
			t.Skip("the image's test runs it")
		}
		qemu, err := exec.LookPath("qemu-" + map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[arch] + "-static")
		if err != nil {
			t.Skip(err)
		}
		answersPing(t, os.Environ(), &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}, qemu, path)
	})
}

// answersPing starts a program over simulated workers, asks it by ping.sh, and has it
// end by SIGTERM.
func answersPing(t *testing.T, environ []string, attributes *syscall.SysProcAttr, program string, args ...string) {
	t.Helper()
	first := testkit.FreePorts(t, 6)
	port := func(flag string, i int) string { return fmt.Sprintf("--%s=%d", flag, first+i) }
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append(args, "--engine=mocker", "--num-workers=1", "--drain-delay=0s",
		port("http-port", 0), port("router-port", 1), port("base-worker-port", 2), port("base-kv-events-port", 3), port("base-kv-replay-port", 4), port("base-metrics-port", 5))...)
	var log testkit.LogBuffer
	cmd.Stdout, cmd.Stderr, cmd.Env, cmd.SysProcAttr = &log, &log, environ, attributes
	if attributes.Chroot != "" {
		cmd.Dir = "/"
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	url := fmt.Sprintf("http://127.0.0.1:%d", first)
	testkit.Eventually(t, 2*time.Minute, "it is ready: "+program, func() bool {
		response, err := http.Get(url + "/ready")
		if err != nil {
			return false
		}
		_ = response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	cold := output(t, "./ping.sh", "--url", url)
	again := output(t, "./ping.sh", "--url", url)
	found := regexp.MustCompile(`predicted overlap: ([1-9]\d*) of \d+ prompt tokens\nactually cached:   ([1-9]\d*) of`).FindStringSubmatch(again)
	if !strings.Contains(cold, "predicted overlap: 0 of") || found == nil || found[1] != found[2] {
		t.Errorf("ping.sh prints\n%s\nand then\n%s\nlog:\n%s", cold, again, log.Tail())
	}
	t.Log(again)
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("its end: %v\n%s", err, log.Tail())
	}
}
