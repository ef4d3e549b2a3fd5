package control

import (
	"testing"

	"kvrouter/internal/base/kv"
)

func TestChangeOf(t *testing.T) {
	type change = kv.EngineChange
	for _, c := range []struct {
		uri, body string
		want      change
	}{
		{"/v1/models", "", change{}},
		{"/is_paused", "", change{}},
		{"/pause", "", change{Set: kv.Paused, Resets: true}},
		{"/pause?mode=keep&clear_cache=true", "", change{Set: kv.Paused, Resets: true}},
		{"/pause?mode=keep&clear_cache=false", "", change{Set: kv.Paused}},
		{"/resume", "", change{Clear: kv.Paused}},
		{"/sleep", "", change{Set: kv.Asleep, Resets: true}},
		{"/sleep?level=2", "", change{Set: kv.Asleep, Resets: true}},
		{"/sleep?level=0", "", change{Set: kv.Paused}},
		{"/wake_up", "", change{Clear: kv.Asleep | kv.Paused}},
		{"/wake_up?tags=weights", "", change{}},
		{"/wake_up?tags=weights&tags=kv_cache", "", change{Clear: kv.Asleep | kv.Paused}},
		{"/reset_prefix_cache?reset_running_requests=true", "", change{Resets: true}},
		{"/start_weight_update", "{}", change{Set: kv.Updating}},
		{"/update_weights", `{"weight_dir":"/w"}`, change{Meanwhile: kv.Updating}},
		{"/finish_weight_update", `{"weight_version":"17"}`, change{Clear: kv.Updating, Version: "17"}},
		{"/finish_weight_update", `{"weight_version":17}`, change{Clear: kv.Updating, Version: "17"}},
		{"/update_weight_version", `{"new_version":"a"}`, change{Version: "a"}},
		{"/pause_generation", `{"mode":"retract"}`, change{Set: kv.Paused}},
		{"/continue_generation", "{}", change{Clear: kv.Paused}},
		{"/flush_cache?timeout=3", "", change{Resets: true}},
		{"/update_weights_from_disk", `{"model_path":"/w","weight_version":"3"}`, change{Meanwhile: kv.Updating, Resets: true, Version: "3"}},
		{"/update_weights_from_disk", `{"flush_cache":false}`, change{Meanwhile: kv.Updating}},
		{"/release_memory_occupation", "{}", change{Set: kv.Asleep | kv.Stripped, Resets: true}},
		{"/release_memory_occupation", `{"tags":["kv_cache"]}`, change{Set: kv.Asleep, Resets: true}},
		{"/resume_memory_occupation", "{}", change{Clear: kv.Asleep | kv.Stripped}},
		{"/release_memory_occupation", `{"tags":["weights"]}`, change{Set: kv.Stripped}},
		{"/resume_memory_occupation", `{"tags":["weights"]}`, change{Clear: kv.Stripped}},
		{"/resume_memory_occupation", `{"tags":["kv_cache","cuda_graph"]}`, change{Clear: kv.Asleep | kv.Stripped}},
		{"/update_weight_version", `[`, change{}},
		{"/update_weight_version", `{"new_version":"` + string(make([]byte, 200)) + `"}`, change{}},
	} {
		if got := ChangeOf(c.uri, []byte(c.body)); got != c.want {
			t.Errorf("%s %.40s: %+v, want %+v", c.uri, c.body, got, c.want)
		}
	}
}

func TestSucceeded(t *testing.T) {
	for _, c := range []struct {
		status int
		answer string
		want   bool
	}{
		{200, "", true}, {200, "Cache flushed.", true}, {200, `{"success":true}`, true}, {200, `{"success":false}`, false},
		{400, `{"success":true}`, false}, {503, "", false}, {202, "{}", true},
	} {
		if got := Succeeded(c.status, []byte(c.answer)); got != c.want {
			t.Errorf("%d %s: %v", c.status, c.answer, got)
		}
	}
}

// FuzzChangeOf looks for calls that make it fail, or give a version that is too long.
func FuzzChangeOf(f *testing.F) {
	f.Add("/pause?mode=keep", "")
	f.Add("/update_weight_version", `{"new_version":"1"}`)
	f.Fuzz(func(t *testing.T, uri, body string) {
		if got := ChangeOf(uri, []byte(body)); len(got.Version) > kv.MaxVersion {
			t.Errorf("a version of %d bytes", len(got.Version))
		}
	})
}
