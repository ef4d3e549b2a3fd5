package probe

import (
	"bytes"
	"encoding/json"
	"math"
	"regexp"
	"slices"
	"strings"
)

// maxTierNames bounds the names of lower tiers that are kept of a server.
const maxTierNames = 8

// Tiers is what a server reports of the tiers below its cache. The zero value: none.
type Tiers struct {
	Host    bool     // it keeps blocks in memory of its machine
	Storage []string // its further tiers by the engine's names, such as 1:fs or file
	// Pulls reports that it can pull blocks from other workers: vLLM's tier p2p. Its port
	// for them is PullPort; 0: not reported.
	Pulls    bool
	PullPort uint16
	// LookedUp and Found are the tokens that requests have looked for below the cache, and
	// those found there; 0 for SGLang.
	LookedUp, Found float64
	LMCache         bool // the tiers are LMCache's
	// Connector is vLLM's KV connector; empty: not reported. Only a server in development
	// mode reports it, with the next two.
	Connector string
	Described bool // KV events of host memory have tokens and parents
	Told      bool // all further tiers publish KV events
}

// Any reports whether there is a lower tier.
func (t Tiers) Any() bool { return t.Host || len(t.Storage) > 0 || t.LMCache || t.Pulls }

// tierLabel is the name of a further tier on vLLM's metrics page.
var tierLabel = regexp.MustCompile(`\btier="([^"\n]{1,64})"`)

// External caches on vLLM's metrics page.
const (
	externalQueries = "vllm:external_prefix_cache_queries_total"
	externalHits    = "vllm:external_prefix_cache_hits_total"
)

// ParseVLLMTiers reads the lower tiers of a vLLM server from its metrics page.
func ParseVLLMTiers(page []byte) Tiers {
	t := Tiers{Host: bytes.Contains(page, []byte("\nvllm:kv_offload_")), LMCache: bytes.Contains(page, []byte("\nlmcache"))}
	for _, label := range tierLabel.FindAllSubmatch(page, -1) {
		// 0 is the first tier, host memory.
		name := string(label[1])
		if strings.HasSuffix(name, ":p2p") {
			t.Pulls = true
			continue
		}
		if name[0] != '0' && !slices.Contains(t.Storage, name) && len(t.Storage) < maxTierNames {
			t.Storage = append(t.Storage, name)
		}
	}
	slices.Sort(t.Storage)
	if families, err := parsePage(bytes.NewReader(page), []string{externalQueries, externalHits}, nil, nil); err == nil {
		t.LookedUp, t.Found = families.sum(externalQueries), families.sum(externalHits)
	}
	return t
}

// sum returns the sum of a counter over all engines.
func (p Page) sum(name string) (sum float64) {
	for _, metric := range p[name].GetMetric() {
		sum += max(0, metric.GetCounter().GetValue())
	}
	return sum
}

// vllmConnector is the part of vLLM's report about itself that describes its tiers.
type vllmConnector struct {
	Name  string `json:"kv_connector"`
	Extra struct {
		Describes  bool            `json:"self_describing_kv_events"`
		Connectors []vllmConnector `json:"connectors"`
		Secondary  []struct {
			Kind   string `json:"type"`
			Events bool   `json:"enable_kv_events"`
			Port   any    `json:"port"` // a number; another value does not spoil the rest
		} `json:"secondary_tiers"`
	} `json:"kv_connector_extra_config"`
}

// AddVLLMConfig completes t by an answer to GET /server_info?config_format=json, which a
// vLLM server gives in development mode only.
func (t *Tiers) AddVLLMConfig(answer []byte) {
	var report struct {
		Config struct {
			Connector vllmConnector `json:"kv_transfer_config"`
		} `json:"vllm_config"`
	}
	if json.Unmarshal(answer, &report) != nil {
		return // of another form
	}
	for _, c := range append(report.Config.Connector.Extra.Connectors, report.Config.Connector) {
		if c.Name == "" || c.Name == "MultiConnector" || len(c.Name) > 64 {
			continue
		}
		t.Connector, t.Described, t.Told = c.Name, c.Extra.Describes, true
		for _, tier := range c.Extra.Secondary {
			if tier.Kind == "p2p" {
				t.Pulls = true
				if port, ok := tier.Port.(float64); ok && port > 0 && port <= math.MaxUint16 {
					t.PullPort = uint16(port)
				}
				continue
			}
			t.Told = t.Told && tier.Events
		}
		if c.Name == "OffloadingConnector" {
			return
		}
	}
}

// Tiers returns the lower tiers of an SGLang server.
func (i *ServerInfo) Tiers() (t Tiers) {
	if !i.Hierarchical {
		return t
	}
	t.Host = true
	if i.Storage != "" {
		t.Storage = []string{i.Storage}
	}
	return t
}
