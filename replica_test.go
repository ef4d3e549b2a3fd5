package main

import (
	"testing"
)

func TestReplicaSettingsAreChecked(t *testing.T) {
	for _, c := range []struct {
		args []string
		ok   bool
	}{
		{[]string{"--replica-sync", "--replica-peers=a:7100,[::1]:7101"}, true},
		{[]string{"--replica-sync"}, true},
		{[]string{"--replica-peers=a:7100"}, false},
		{[]string{"--replica-sync", "--replica-peers=a"}, false},
		{[]string{"--replica-sync", "--replica-peers=a:0"}, false},
		{[]string{"--replica-sync", "--replica-peers=:7100"}, false},
		{[]string{"--replica-sync", "--replica-sync-port=8000"}, false}, // the OpenAI port
	} {
		if _, _, err := ParseConfig(append([]string{"--engine=mocker"}, c.args...)); (err == nil) != c.ok {
			t.Errorf("%v: %v", c.args, err)
		}
	}
}
