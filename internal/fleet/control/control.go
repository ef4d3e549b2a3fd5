// Package control knows the calls by which trainers change engines: those of vLLM in development mode, and of SGLang.
// What each does was read in vLLM 0.32 and SGLang 0.5.23.
package control

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
)

// call is what a call says: the parameters of its query, and its body.
type call struct {
	query url.Values
	body  gjson.Result
}

// flag returns a parameter of the query that is true unless it says false.
func (c call) flag(name string) bool {
	return !slices.Contains([]string{"false", "0", "False", "no", "off"}, c.query.Get(name))
}

// whole reports whether the call is about the memory of the KV cache, by its tags. Without tags it is about all memory.
func (c call) whole(tags []string) bool { return len(tags) == 0 || slices.Contains(tags, "kv_cache") }

// tags returns the tags of the body.
func (c call) tags() (tags []string) {
	for _, tag := range c.body.Get("tags").Array() {
		tags = append(tags, tag.Str)
	}
	return tags
}

// memory returns what the call is about, by the tags of the body.
func (c call) memory() (state kv.EngineState) {
	tags := c.tags()
	if c.whole(tags) {
		state = kv.Asleep
	}
	if len(tags) == 0 || slices.ContainsFunc(tags, func(tag string) bool { return tag != "kv_cache" }) {
		state |= kv.Stripped
	}
	return state
}

// update is the change by a call that returns once the weights are new.
func update(c call) kv.EngineChange {
	flush := c.body.Get("flush_cache")
	return kv.EngineChange{Meanwhile: kv.Updating, Version: c.body.Get("weight_version").String(),
		Resets: !flush.Exists() || flush.Bool()}
}

// renamed is the change by a call that only names the weights.
func renamed(c call) kv.EngineChange {
	return kv.EngineChange{Version: c.body.Get("new_version").String()}
}

// changes are what the calls do, by path.
var changes = map[string]func(call) kv.EngineChange{
	// of vLLM
	"/pause":  func(c call) kv.EngineChange { return kv.EngineChange{Set: kv.Paused, Resets: c.flag("clear_cache")} },
	"/resume": func(call) kv.EngineChange { return kv.EngineChange{Clear: kv.Paused} },
	"/sleep": func(c call) kv.EngineChange {
		if c.query.Get("level") == "0" {
			return kv.EngineChange{Set: kv.Paused}
		}
		return kv.EngineChange{Set: kv.Asleep, Resets: true}
	},
	"/wake_up": func(c call) kv.EngineChange {
		if !c.whole(c.query["tags"]) {
			return kv.EngineChange{}
		}
		return kv.EngineChange{Clear: kv.Asleep | kv.Paused}
	},
	"/reset_prefix_cache":        func(call) kv.EngineChange { return kv.EngineChange{Resets: true} },
	"/start_weight_update":       func(call) kv.EngineChange { return kv.EngineChange{Set: kv.Updating} },
	"/start_draft_weight_update": func(call) kv.EngineChange { return kv.EngineChange{Set: kv.Updating} },
	"/update_weights":            func(call) kv.EngineChange { return kv.EngineChange{Meanwhile: kv.Updating} },
	"/finish_weight_update": func(c call) kv.EngineChange {
		return kv.EngineChange{Clear: kv.Updating, Version: c.body.Get("weight_version").String()}
	},
	"/update_weight_version": renamed, // of both
	// of SGLang
	"/pause_generation":    func(call) kv.EngineChange { return kv.EngineChange{Set: kv.Paused} },
	"/continue_generation": func(call) kv.EngineChange { return kv.EngineChange{Clear: kv.Paused} },
	"/flush_cache":         func(call) kv.EngineChange { return kv.EngineChange{Resets: true} },
	"/release_memory_occupation": func(c call) kv.EngineChange {
		return kv.EngineChange{Set: c.memory(), Resets: c.whole(c.tags())}
	},
	"/resume_memory_occupation": func(c call) kv.EngineChange { return kv.EngineChange{Clear: c.memory()} },
	"/begin_weight_update":      func(call) kv.EngineChange { return kv.EngineChange{Set: kv.Updating} },
	"/end_weight_update": func(c call) kv.EngineChange {
		return kv.EngineChange{Clear: kv.Updating, Version: c.body.Get("weight_version").String()}
	},
	"/update_weights_from_disk": update,
}

// ChangeOf returns what a call does to an engine if it succeeds. uri is its path and query; the zero value: nothing.
func ChangeOf(uri string, body []byte) (change kv.EngineChange) {
	path, query, _ := strings.Cut(uri, "?")
	of := changes[path]
	if of == nil {
		return change
	}
	c := call{body: gjson.ParseBytes(body)}
	c.query, _ = url.ParseQuery(query) // engines refuse what cannot be read
	change = of(c)
	if len(change.Version) > kv.MaxVersion {
		change.Version = ""
	}
	return change
}

// Succeeded reports whether an engine has done what the call asks for. vLLM and SGLang also answer 200 with success
// false.
func Succeeded(status int, answer []byte) bool {
	if status/100 != http.StatusOK/100 {
		return false
	}
	success := gjson.GetBytes(answer, "success")
	return !success.Exists() || success.Bool()
}
