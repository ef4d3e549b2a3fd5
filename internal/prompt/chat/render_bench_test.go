package chat

import (
	"fmt"
	"strings"
	"testing"

	"kvrouter/internal/testkit"
)

// longChat is a chat of about 60 KB in 40 turns.
func longChat() []byte {
	paragraph := strings.Repeat("The quick brown fox jumps over the lazy dog, 12345 times. ", 13)
	var turns []string
	for i := range 40 {
		turns = append(turns, fmt.Sprintf(`{"role":"user","content":"%d %s"},{"role":"assistant","content":"%s"}`, i, paragraph, paragraph))
	}
	return []byte(`{"messages":[` + strings.Join(turns, ",") + `]}`)
}

func BenchmarkRenderLongChat(b *testing.B) {
	files, err := ReadFiles("testdata/parity/qwen3", DefaultLimits)
	if err != nil {
		b.Fatal(err)
	}
	r := NewRenderer(files, Options{})
	defer r.Close()
	for name, body := range map[string][]byte{"60KB": longChat(), "small": []byte(testkit.ChatsForParity()[1].Body)} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				req, err := parseText(string(body), Completion, Options{})
				if err != nil {
					b.Fatal(err)
				}
				chat, err := r.Render(req)
				if err != nil {
					b.Fatal(err)
				}
				chat.Free()
			}
		})
	}
}
