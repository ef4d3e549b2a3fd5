package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/vllm"
	"kvrouter/internal/workers"

	"github.com/google/go-cmp/cmp"
)

func TestPrefillAndDecodeWorkersAreStartedForTheirParts(t *testing.T) {
	const producer, consumer = `{"kv_connector":"NixlConnector","kv_role":"kv_producer"`, `{"kv_connector":"NixlConnector","kv_role":"kv_consumer"`
	for _, test := range []struct {
		name   string
		gpus   []string
		args   string
		env    []string
		device string
		ports  []string // of each worker's side channel
		want   []string // in every worker's environment
		not    []string
	}{
		{
			name: "on the CPU", device: `,"kv_buffer_device":"cpu"`, ports: []string{"5600", "5601", "5602"},
			want: []string{"UCX_TLS=tcp,self,sm", "UCX_NET_DEVICES=lo", "KVROUTER_NIXL_POLL_US=1000"},
		},
		{
			name: "the user's transport wins", device: `,"kv_buffer_device":"cpu"`, ports: []string{"5600", "5601", "5602"},
			env:  []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=eth0", "VLLM_NIXL_SIDE_CHANNEL_PORT=1", "VLLM_NIXL_SIDE_CHANNEL_HOST=0.0.0.0"},
			want: []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=eth0"}, not: []string{"VLLM_NIXL_SIDE_CHANNEL_PORT=1", "VLLM_NIXL_SIDE_CHANNEL_HOST=0.0.0.0"},
		},
		{
			name: "one GPU each", gpus: []string{"0", "1", "2"}, args: "--base-nixl-port 6000", ports: []string{"6000", "6001", "6002"},
			not: []string{"UCX_TLS=tcp,self,sm", "UCX_NET_DEVICES=lo", "KVROUTER_NIXL_POLL_US=1000"},
		},
		{
			name: "a rank adds its number to the port itself", device: `,"kv_buffer_device":"cpu"`, args: "-- --data-parallel-size 2", ports: []string{"5600", "5602", "5604"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			args := append([]string{"--python", "py", "--model", "org/name", "--prefill-workers", "1", "--decode-workers", "2"}, strings.Fields(test.args)...)
			cfg := mustParse(t, testMachine(t, test.gpus...), args...)
			for i, port := range test.ports {
				spec, err := vllm.Command(cfg.vllmSettings(), i, "/plugin", test.env)
				if err != nil {
					t.Fatal(err)
				}
				role := consumer
				if i == 0 {
					role = producer
				}
				if want := role + test.device + `,"kv_load_failure_policy":"recompute"}`; !slices.Contains(spec.Argv, want) {
					t.Errorf("worker %d: no %s in %q", i, want, spec.Argv)
				}
				for _, want := range append(test.want, "VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT="+port) {
					if !slices.Contains(spec.Env, want) {
						t.Errorf("worker %d: no %s in %q", i, want, spec.Env)
					}
				}
				for _, not := range test.not {
					if slices.Contains(spec.Env, not) {
						t.Errorf("worker %d: %s in %q", i, not, spec.Env)
					}
				}
			}
			var ports []int
			for _, use := range cfg.ports() {
				if use.flag == "--base-nixl-port" {
					ports = append(ports, use.port-cfg.BaseNIXLPort)
				}
			}
			if want := []int{0, 1, 2, 3, 4, 5}[:3*cfg.Ranks()]; !slices.Equal(ports, want) {
				t.Errorf("side channels at base + %v, want %v", ports, want)
			}
		})
	}
}

func TestWorkersWithoutPartsHaveNoSideChannel(t *testing.T) {
	cfg := mustParse(t, testMachine(t), "--python", "py", "--model", "org/name", "--", "--kv-transfer-config", "{}")
	spec, err := vllm.Command(cfg.vllmSettings(), 0, "/plugin", nil)
	if err != nil || !slices.Contains(spec.Argv, "{}") || strings.Contains(strings.Join(spec.Env, " "), "NIXL") {
		t.Errorf("%q %q %v", spec.Argv, spec.Env, err)
	}
	for _, use := range cfg.ports() {
		if use.flag == "--base-nixl-port" {
			t.Errorf("listens on %s", use)
		}
	}
}

func TestStartedWorkersHaveTheirParts(t *testing.T) {
	python := filepath.Join(t.TempDir(), "python")
	testkit.WriteFile(t, python, "#!/bin/sh\nexit $NIXL_EXIT\n")
	if err := os.Chmod(python, 0o700); err != nil {
		t.Fatal(err)
	}
	config := func(args ...string) Config {
		return mustParse(t, testMachine(t), append([]string{"--python", python, "--model", "org/name"}, args...)...)
	}
	apart := config("--prefill-workers", "2", "--decode-workers", "1")
	whole := config()
	log := slog.New(slog.DiscardHandler)

	t.Setenv("NIXL_EXIT", "3")
	if _, err := vllm.NewLauncher(apart.vllmSettings(), log); err == nil || !strings.Contains(err.Error(), "no NIXL") || !strings.Contains(err.Error(), "make setup") {
		t.Errorf("without NIXL: %v", err)
	}
	if _, err := vllm.NewLauncher(whole.vllmSettings(), log); err != nil {
		t.Errorf("NIXL is asked for where nobody needs it: %v", err)
	}
	t.Setenv("NIXL_EXIT", "1")
	if _, err := vllm.NewLauncher(apart.vllmSettings(), log); err == nil || !strings.Contains(err.Error(), "cannot be asked") {
		t.Errorf("with a Python that does not work: %v", err)
	}

	t.Setenv("NIXL_EXIT", "0")
	for _, test := range []struct {
		name string
		cfg  Config
		want []kv.Disagg
	}{
		{"apart", apart, []kv.Disagg{{Role: kv.RolePrefill, Kind: kv.KindNIXL}, {Role: kv.RolePrefill, Kind: kv.KindNIXL}, {Role: kv.RoleDecode, Kind: kv.KindNIXL}}},
		{"whole", whole, []kv.Disagg{{}, {}}},
	} {
		fleet := workers.NewFleet(test.cfg.fleetSettings(), nil, nil, workers.Hooks{}, log)
		var parts []kv.Disagg
		for _, w := range fleet.Members() {
			parts = append(parts, w.Spec.Disagg)
		}
		if diff := cmp.Diff(test.want, parts); diff != "" {
			t.Errorf("%s: %s", test.name, diff)
		}
	}
}
