package mocker

import (
	"bytes"
	"fmt"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
)

// metricsPage is the part of an engine's Prometheus page that others read.
type metricsPage struct {
	w      *Worker
	prefix string
	format byte // of numbers, as in strconv.FormatFloat
	labels func(*Rank) string
	text   []byte
}

// add adds a metric with a sample of each rank; more are labels beside those of all.
func (p *metricsPage) add(kind, name, more string, value func(*Rank, Load) float64) {
	if head := fmt.Appendf(nil, "# TYPE %s:%s %s\n", p.prefix, name, kind); !bytes.Contains(p.text, head) {
		p.text = append(p.text, head...)
	}
	for _, r := range p.w.Ranks {
		p.text = fmt.Appendf(p.text, "%s:%s{%s%s} %s\n", p.prefix, name, p.labels(r), more,
			strconv.FormatFloat(value(r, r.CurrentLoad()), p.format, -1, 64))
	}
}

func (p *metricsPage) gauge(name string, value func(*Rank, Load) float64) {
	p.add("gauge", name, "", value)
}

func (p *metricsPage) count(name, more string, counter func(*counts) *atomic.Int64) {
	p.add("counter", name, more, func(r *Rank, _ Load) float64 { return float64(counter(&r.Counts).Load()) })
}

// metrics serves vLLM's page.
func (w *Worker) metrics(out http.ResponseWriter, _ *http.Request) {
	page := metricsPage{w: w, prefix: "vllm", format: 'g', labels: func(r *Rank) string {
		return fmt.Sprintf(`engine="%d",model_name=%q`, r.number, w.cfg.ServedModelName)
	}}
	page.gauge("num_requests_running", func(_ *Rank, l Load) float64 { return float64(l.Running) })
	page.gauge("num_requests_waiting", func(_ *Rank, l Load) float64 { return float64(l.Waiting) })
	page.gauge("kv_cache_usage_perc", func(_ *Rank, l Load) float64 { return l.Usage })
	page.count("prefix_cache_queries_total", "", func(c *counts) *atomic.Int64 { return &c.prefixQueries })
	page.count("prefix_cache_hits_total", "", func(c *counts) *atomic.Int64 { return &c.prefixHits })
	if w.part.Kind == kv.KindNIXL || len(w.cfg.Tiers()) > 0 {
		page.add("counter", "external_prefix_cache_hits_total", "", func(r *Rank, _ Load) float64 {
			return float64(r.Counts.ExternalHits.Load() + r.Counts.tiers.host.Load() + r.Counts.tiers.disk.Load() + r.Counts.tiers.peer.Load())
		})
	}
	page.tierMetrics(&w.cfg)
	page.count("prompt_tokens_total", "", func(c *counts) *atomic.Int64 { return &c.PromptTokens })
	page.count("generation_tokens_total", "", func(c *counts) *atomic.Int64 { return &c.GenerationTokens })
	page.count("request_success_total", `,finished_reason="stop"`, func(c *counts) *atomic.Int64 { return &c.finishedStop })
	page.count("request_success_total", `,finished_reason="length"`, func(c *counts) *atomic.Int64 { return &c.finishedLength })
	page.count("request_success_total", `,finished_reason="abort"`, func(c *counts) *atomic.Int64 { return &c.Aborted })
	page.labels = func(r *Rank) string {
		return fmt.Sprintf(`block_size="%d",engine="%d",num_gpu_blocks="%d"`, w.cfg.BlockSize, r.number, w.cfg.NumGPUBlocks*len(w.Ranks)) // vLLM shows the sum
	}
	page.gauge("cache_config_info", func(*Rank, Load) float64 { return 1 })
	page.adapters()
	page.sleepState()
	out.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_, _ = out.Write(page.text)
}

// adapters adds vLLM's metric of the LoRA adapters, which names those of requests that run or
// wait under both labels. Its value is when they were last so: samples of other adapters stay
// on vLLM's page, here that of none.
func (p *metricsPage) adapters() {
	slots := p.w.cfg.loraSlots()
	if slots == 0 {
		return
	}
	sample := func(names string, at time.Time) {
		p.text = fmt.Appendf(p.text, "vllm:lora_requests_info{max_lora=\"%d\",running_lora_adapters=%q,waiting_lora_adapters=%q} %s\n",
			slots, names, names, strconv.FormatFloat(float64(at.UnixMicro())/1e6, p.format, -1, 64))
	}
	p.text = append(p.text, "# TYPE vllm:lora_requests_info gauge\n"...)
	none := p.w.started
	for _, r := range p.w.Ranks {
		switch shown := r.adapters.Load(); {
		case shown == nil:
		case shown.names == "":
			none = shown.at
		default:
			sample(shown.names, shown.at)
		}
	}
	sample("", none)
}

// sleepState adds vLLM's metric of released memory.
func (p *metricsPage) sleepState() {
	now := "awake"
	if p.w.asleep.Load() {
		now = "weights_offloaded"
	}
	p.text = append(p.text, "# TYPE vllm:engine_sleep_state gauge\n"...)
	for _, state := range []string{"awake", "weights_offloaded", "discard_all"} {
		value := 0
		if state == now {
			value = 1
		}
		p.text = fmt.Appendf(p.text, "vllm:engine_sleep_state{engine=\"0\",sleep_state=%q} %d\n", state, value)
	}
}

// sglangMetrics serves SGLang's page.
func (w *Worker) sglangMetrics(out http.ResponseWriter, _ *http.Request) {
	engine := "unified"
	if w.part.Role != kv.RoleBoth {
		engine = w.part.Role.String()
	}
	page := metricsPage{w: w, prefix: "sglang", format: 'f', labels: func(r *Rank) string {
		labels := fmt.Sprintf(`engine_type=%q,model_name=%q,moe_ep_rank="0",pp_rank="0",tp_rank="0"`, engine, w.cfg.ServedModelName)
		if len(w.Ranks) > 1 {
			labels = fmt.Sprintf(`dp_rank="%d",%s`, r.number, labels)
		}
		return labels
	}}
	capacity, blockSize := float64(w.capacity()), float64(w.cfg.BlockSize)
	available := func(r *Rank) float64 { return float64(r.free.Load()) * blockSize }
	page.gauge("num_running_reqs", func(_ *Rank, l Load) float64 { return float64(l.Running) })
	page.gauge("num_queue_reqs", func(_ *Rank, l Load) float64 { return float64(l.Waiting) })
	page.gauge("token_usage", func(_ *Rank, l Load) float64 { return float64(l.Used) / capacity })
	page.gauge("num_used_tokens", func(_ *Rank, l Load) float64 { return float64(l.Used) })
	page.gauge("kv_available_tokens", func(r *Rank, _ Load) float64 { return available(r) })
	page.gauge("kv_evictable_tokens", func(r *Rank, l Load) float64 { return max(0, capacity-available(r)-float64(l.Used)) })
	page.gauge("kv_used_tokens", func(_ *Rank, l Load) float64 { return float64(l.Used) })
	page.gauge("max_total_num_tokens", func(*Rank, Load) float64 { return capacity })
	page.gauge("page_size", func(*Rank, Load) float64 { return blockSize })
	page.gauge("num_pages", func(*Rank, Load) float64 { return capacity / blockSize })
	page.gauge("cache_hit_rate", func(r *Rank, _ Load) float64 { return r.hitRate() })
	for _, name := range []string{
		"gen_throughput", "num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs", "num_decode_prealloc_queue_reqs",
		"num_decode_transfer_queue_reqs",
	} {
		page.gauge(name, func(*Rank, Load) float64 { return 0 })
	}
	if slots := w.cfg.loraSlots(); slots > 0 {
		page.gauge("lora_pool_slots_total", func(*Rank, Load) float64 { return float64(slots) })
	}
	page.count("prompt_tokens_total", "", func(c *counts) *atomic.Int64 { return &c.PromptTokens })
	page.count("generation_tokens_total", "", func(c *counts) *atomic.Int64 { return &c.GenerationTokens })
	page.count("evicted_tokens_total", "", func(c *counts) *atomic.Int64 { return &c.evicted })
	page.count("num_aborted_requests_total", "", func(c *counts) *atomic.Int64 { return &c.Aborted })
	page.add("counter", "num_requests_total", "", func(r *Rank, _ Load) float64 {
		return float64(r.Counts.finishedLength.Load() + r.Counts.finishedStop.Load() + r.Counts.Aborted.Load())
	})
	page.count("prefill_effective_tokens_total", `,mode="input"`, func(c *counts) *atomic.Int64 { return &c.prefilled })
	page.count("prefill_effective_tokens_total", `,mode="device_hit"`, func(c *counts) *atomic.Int64 { return &c.prefixHits })
	page.count("prefill_effective_tokens_total", `,mode="host_hit"`, func(c *counts) *atomic.Int64 { return &c.tiers.host })
	page.count("prefill_effective_tokens_total", `,mode="storage_hit"`, func(c *counts) *atomic.Int64 { return &c.tiers.disk })
	page.count("cached_tokens_total", `,cache_source="device"`, func(c *counts) *atomic.Int64 { return &c.prefixHits })
	page.count("cached_tokens_total", `,cache_source="host"`, func(c *counts) *atomic.Int64 { return &c.tiers.host })
	page.count("cached_tokens_total", `,cache_source="storage"`, func(c *counts) *atomic.Int64 { return &c.tiers.disk })
	out.Header().Set("Content-Type", "text/plain; version=1.0.0; charset=utf-8")
	_, _ = out.Write(page.text)
}

// hitRate is the share of the prompts' tokens that were in the cache, 0 to 1.
func (r *Rank) hitRate() float64 {
	return float64(r.Counts.prefixHits.Load()) / float64(max(1, r.Counts.prefixQueries.Load()))
}
