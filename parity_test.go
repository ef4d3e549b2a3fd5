package main

import (
	"kvrouter/internal/testkit"
	"strings"
)

// parityChats are bodies for /tokenize: a router and a worker must answer each
// with the same tokens.
func parityChats() [][]byte {
	var out [][]byte
	for _, c := range testkit.ChatsForParity() {
		out = append(out, []byte(c.Body))
	}
	paragraph := strings.Repeat("The quick brown fox jumps over the lazy dog, 12345 times. Größe! ", 60)
	return append(out, []byte(`{"messages":[{"role":"system","content":"`+paragraph+`"},{"role":"user","content":"`+paragraph+`"}]}`))
}
