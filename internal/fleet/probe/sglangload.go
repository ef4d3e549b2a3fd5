package probe

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"

	dto "github.com/prometheus/client_model/go"
	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// loadStatTag is what the first field of SGLang's load messages says.
const loadStatTag = "LoadStat"

// isLoadStat reports whether text is a message of SGLang's, a msgpack array, not JSON.
func isLoadStat(payload []byte) bool {
	if len(payload) == 0 {
		return false
	}
	code := payload[0]
	return msgpcode.IsFixedArray(code) || code == msgpcode.Array16 || code == msgpcode.Array32
}

// readLoadStat reads a load message of SGLang's: a msgpack array of its tag, requests
// that run, requests that wait (of a prefill or decode server also those in its other
// queues), tokens of the KV cache in use, those that it can hold (0: unknown), and more
// that does not matter here.
func readLoadStat(payload []byte) (policy.Published, error) {
	reader := bytes.NewReader(payload)
	d := msgpack.NewDecoder(reader)
	fields, err := d.DecodeArrayLen()
	if err != nil {
		return policy.Published{}, fmt.Errorf("load message: %w", err)
	}
	if fields < 5 {
		return policy.Published{}, fmt.Errorf("load message has %d fields, want %s and 4 numbers", fields, loadStatTag)
	}
	tag, err := d.DecodeBytesLen()
	if at := len(payload) - reader.Len(); err != nil || tag != len(loadStatTag) || !bytes.HasPrefix(payload[at:], []byte(loadStatTag)) {
		return policy.Published{}, fmt.Errorf("load message does not begin with %s", loadStatTag)
	}
	_, _ = reader.Seek(int64(tag), io.SeekCurrent)
	var numbers [4]float64
	for i := range numbers {
		if numbers[i], err = msgpackNumber(d); err != nil {
			return policy.Published{}, fmt.Errorf("load message: field %d: %w", i+1, err)
		}
	}
	return published(numbers[0], numbers[1], share(numbers[2], numbers[3])), nil
}

// msgpackNumber reads a whole number or a float, however large.
func msgpackNumber(d *msgpack.Decoder) (float64, error) {
	code, err := d.PeekCode()
	switch {
	case err != nil:
		return 0, err
	case code == msgpcode.Float || code == msgpcode.Double:
		return d.DecodeFloat64()
	case code == msgpcode.Uint64: // the library reads all others with a sign
		n, err := d.DecodeUint64()
		return float64(n), err
	case msgpcode.IsFixedNum(code), code >= msgpcode.Uint8 && code <= msgpcode.Int64:
		n, err := d.DecodeInt64()
		return float64(n), err
	}
	return 0, fmt.Errorf("msgpack code %#x is no number", code)
}

// share is used of capacity; 0 where that is not known.
func share(used, capacity float64) float64 {
	if capacity <= 0 {
		return 0
	}
	return used / capacity
}

// SGLang's metrics that a load is read out of. The queues of a prefill or decode server
// hold requests that wait as well; other servers may not show them.
const (
	sglangRunning = "sglang:num_running_reqs"
	sglangWaiting = "sglang:num_queue_reqs"
	sglangUsage   = "sglang:token_usage"
)

var sglangQueues = [...]string{"sglang:num_prefill_bootstrap_queue_reqs", "sglang:num_decode_prealloc_queue_reqs",
	"sglang:num_decode_transfer_queue_reqs"}

// loadsPath is where an SGLang server lists the loads of its ranks.
const loadsPath = "/v1/loads?include=core"

// sglangLoad reads the load of a rank or, if that is empty, of all together.
func (p Page) sglangLoad(rank string) (policy.Published, error) {
	running, _ := sglangGauge(p[sglangRunning], rank, kv.MaxTokens)
	waiting, hasWaiting := sglangGauge(p[sglangWaiting], rank, kv.MaxTokens)
	for _, name := range sglangQueues {
		queued, _ := sglangGauge(p[name], rank, kv.MaxTokens)
		for at, n := range queued {
			waiting[at] += n
		}
	}
	usage, hasUsage := sglangGauge(p[sglangUsage], rank, 1)
	switch {
	case !hasWaiting:
		return policy.Published{}, fmt.Errorf("metrics page lacks %s", sglangWaiting)
	case !hasUsage:
		return policy.Published{}, fmt.Errorf("metrics page lacks %s", sglangUsage)
	}
	fullest := 0.0
	for _, share := range usage {
		fullest = max(fullest, share)
	}
	return published(sum(running), sum(waiting), fullest), nil
}

// sglangGauge returns a gauge by data-parallel rank, of that rank only unless it is
// empty. The processes of a rank may all show the same. Shares by priority are left out:
// the sample without one is their sum.
func sglangGauge(family *dto.MetricFamily, rank string, most float64) (byRank map[string]float64, ok bool) {
	byRank = map[string]float64{}
	for _, metric := range family.GetMetric() {
		labels := labelsOf(metric)
		at := labels["dp_rank"]
		if labels["priority"] != "" || rank != "" && at != "" && at != rank {
			continue
		}
		byRank[at] = max(byRank[at], gauge(metric.GetGauge().GetValue(), most))
		ok = true
	}
	return byRank, ok
}

func sum(byRank map[string]float64) (all float64) {
	for _, n := range byRank {
		all += n
	}
	return all
}

// sglangLoads is an SGLang server's list of loads, one of each rank.
type sglangLoads struct {
	Loads []struct {
		Rank     int64   `json:"dp_rank"`
		Running  float64 `json:"num_running_reqs"`
		Waiting  float64 `json:"num_waiting_reqs"`
		Used     float64 `json:"num_used_tokens"`
		Capacity float64 `json:"max_total_num_tokens"`
	} `json:"loads"`
}

// load is that of a rank or, where that is empty, of all together.
func (l sglangLoads) load(rank string) (policy.Published, error) {
	running, waiting, fullest, listed := 0.0, 0.0, 0.0, false
	for _, of := range l.Loads {
		if rank != "" && strconv.FormatInt(of.Rank, 10) != rank {
			continue
		}
		listed = true
		running += gauge(of.Running, kv.MaxTokens)
		waiting += gauge(of.Waiting, kv.MaxTokens)
		fullest = max(fullest, gauge(share(of.Used, of.Capacity), 1))
	}
	if !listed {
		return policy.Published{}, errors.New("the list of loads lacks the rank's")
	}
	return published(running, waiting, fullest), nil
}

// cacheTokens is the number of tokens that the KV cache of each rank holds; ranks of unknown size
// are left out.
func (l sglangLoads) cacheTokens() map[uint32]int {
	sizes := map[uint32]int{}
	for _, of := range l.Loads {
		if of.Capacity > 0 && of.Rank >= 0 && of.Rank < kv.MaxRanks {
			sizes[uint32(of.Rank)] = int(min(of.Capacity, kv.MaxTokens))
		}
	}
	return sizes
}
