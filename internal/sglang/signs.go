package sglang

import "kvrouter/internal/process"

// signs tell a start of SGLang and its failures.
func signs() process.Signs {
	return process.Signs{
		Engine: "SGLang",
		Stages: []process.Stage{
			{Name: "starting engine", Signs: []string{"server_args="}},
			{Name: "loading weights", Signs: []string{"Load weight begin"}},
			{Name: "allocating KV cache", Signs: []string{"Load weight end"}},
			{Name: "starting API server", Signs: []string{"Application startup complete"}},
		},
	}
}
