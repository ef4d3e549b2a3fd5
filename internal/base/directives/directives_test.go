package directives

import (
	"bytes"
	"encoding/binary"
	"mime/multipart"
	"net/http"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/base/jsonbody"
)

func TestFind(t *testing.T) {
	for body, want := range map[string]string{
		`{}`: "",
		`{"model":"m","messages":[{"role":"user","content":"\"kv_transfer_params\":{}"}],"max_tokens":1}`: "",
		`{"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"h"}}`:                             "kv_transfer_params",
		`{"kv_transfer_params":{}}`:                                                 "",
		`{"kv_transfer_params":"h"}`:                                                "kv_transfer_params",
		`{"kv_transfer_params":[{"prompt_token_ids":[1]}]}`:                         "kv_transfer_params",
		`{"kv_transfer_params":{"prompt_token_ids":[1,2]}}`:                         "",
		`{"kv_transfer_params":{"prompt_token_ids":[1],"remote_host":null}}`:        "",
		`{"kv_transfer_params":{"prompt_token_ids":[1],"lmcache.x":"h"}}`:           "kv_transfer_params",
		`{"kv_transfer_params":{"remote_kv_source":{"prompt_token_ids":[]}}}`:       "kv_transfer_params",
		`{"\u006bv_transfer_params":{"remote_host":"h"}}`:                           "kv_transfer_params",
		`{"kv_transfer_params":null}`:                                               "",
		`{"kv_transfer_params":{"remote_host":"h"},"kv_transfer_params":null}`:      "kv_transfer_params",
		`{"a":1,"a":2,"bootstrap_host":"h"}`:                                        "bootstrap_host",
		`{"bootstrap_host":null,"bootstrap_port":null,"bootstrap_room":null}`:       "",
		`{"bootstrap_room":0}`:                                                      "bootstrap_room",
		`{"bootstrap_room":[1,2]}`:                                                  "bootstrap_room",
		`{"vllm_xargs":{"kv_transfer_params":"h"}}`:                                 "vllm_xargs.kv_transfer_params",
		`{"vllm_xargs":{"ngram_size":3}}`:                                           "",
		`{"sampling_params":{"extra_args":{"ec_transfer_params":{"h":1}}}}`:         "sampling_params.ec_transfer_params",
		`{"sampling_params":[{"n":1},{"custom_params":{"bootstrap_\u0068ost":1}}]}`: "sampling_params.bootstrap_host",
		`{"extra_body":{"data_parallel_rank":1}}`:                                   "extra_body.data_parallel_rank",
		`{"nvext":{"dp_rank":1,"backend_instance_id":2}}`:                           "",
		`{"nvext":{"disaggregated_params":{"a":1}}}`:                                "nvext.disaggregated_params",
		`{"dp_rank":1}`: "dp_rank",
		`{"requests":[{"a":[{"remote_host":"h"}]}]}`:                                   "requests.remote_host",
		`{"custom_logit_processor":"80"}`:                                              "custom_logit_processor",
		`{"encoder_urls":["h"]}`:                                                       "encoder_urls",
		`{"tools":[{"function":{"parameters":{"properties":{"remote_host":{}}}}}]}`:    "",
		`{"response_format":{"json_schema":{"schema":{"properties":{"dp_rank":{}}}}}}`: "",
	} {
		parsed, ok := jsonbody.Parse([]byte(body))
		if !ok {
			t.Fatal(body)
		}
		if got := Find(parsed); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
}

func TestFindFile(t *testing.T) {
	image := strings.Repeat("iVBORw0KGgo", 20)
	for body, want := range map[string]string{
		`{}`: "",
		`{"messages":[{"role":"user","content":"file:///etc/passwd"}]}`:                                                            "",
		`{"messages":[{"content":[{"type":"image_url","image_url":{"detail":"high","url":"file:///a.png"}}]}]}`:                    "messages",
		`{"messages":[{"content":[{"type":"image_url","\u0069mage_url":"/a.png"}]}]}`:                                              "messages",
		`{"messages":[{"content":[{"type":"image_url","image_url":{"url":"https://h/a.png"}}]}]}`:                                  "",
		`{"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA"}}]}]}`:                         "",
		`{"messages":[{"content":[{"type":"image","source":{"type":"url","url":"../a.jpg"}}]}]}`:                                   "messages",
		`{"messages":[{"content":[{"type":"image","source":{"type":"base64","data":"AA"}},{"input":{"url":"h.example/a.png"}}]}]}`: "",
		`{"messages":[{"content":[{"type":"tool_use","input":{"url":"h.example/a.png","image":"nginx:1"}}]}]}`:                     "",
		`{"messages":[{"content":[{"type":"video_url","video_url":{"url":"x://h/etc/a"}}]}]}`:                                      "messages",
		`{"image_data":"a.png"}`:                                  "image_data",
		`{"image_data":["` + image + `",["/9j/` + image + `"]]}`:  "",
		`{"image_data":[["` + image + `","/data/a"]]}`:            "image_data",
		`{"image_data":[{"format":"x","url":"a.png"}]}`:           "image_data",
		`{"image_data":[[["` + image + `"]]]}`:                    "image_data",
		`{"audio_data":"etc/passwd"}`:                             "audio_data",
		`{"image_data":"` + strings.Repeat(image, 100) + `"}`:     "",
		`{"image_data":null,"video_data":[null]}`:                 "",
		`{"input":[{"text":"a.png","image":"a.png"}]}`:            "input",
		`{"input":"/etc/passwd"}`:                                 "",
		`{"documents":[[{"type":"image_url","image_url":"/a"}]]}`: "documents",
	} {
		parsed, ok := jsonbody.Parse([]byte(body))
		if !ok {
			t.Fatal(body)
		}
		if got := FindFile(parsed); got != want {
			t.Errorf("%.200s: %q, want %q", body, got, want)
		}
	}
}

func TestFindShared(t *testing.T) {
	for body, want := range map[string]string{
		`{"messages":[{"role":"user","content":"uuid"},1,{"content":[{"type":"text","text":"a"}]}]}`:                    "",
		`{"messages":[{"content":[{"type":"tool_use","input":{"uuid":"a"}}],"uuid":"a"}]}`:                              "",
		`{"messages":[{"content":[{"type":"image_url","image_url":null,"\u0075uid":"a"}]}]}`:                            "messages",
		`{"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:,"},"uuid":null}]}]}`:                    "",
		`{"messages":[[{"content":"a"}],[{"content":[{"type":"image_url","image_url":{"url":"data:,"},"uuid":"a"}]}]]}`: "messages",
		`{"content_parts":[{"type":"image_url","url":"data:,","uuid":"a"}]}`:                                            "content_parts",
	} {
		parsed, ok := jsonbody.Parse([]byte(body))
		if !ok {
			t.Fatal(body)
		}
		if got := FindShared(parsed); got != want {
			t.Errorf("%s: %q, want %q", body, got, want)
		}
	}
}

func TestFindInOtherBodies(t *testing.T) {
	form := func(name, file, value string) (string, []byte) {
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		w.WriteField("model", "m")
		if file != "" {
			part, _ := w.CreateFormFile(name, file)
			part.Write([]byte(value))
		} else {
			w.WriteField(name, value)
		}
		w.Close()
		return w.FormDataContentType(), b.Bytes()
	}
	check := func(kind string, body []byte, want string) {
		t.Helper()
		if got := FindIn(kind, body); got != want {
			t.Errorf("%s: %.200s: %q, want %q", kind, body, got, want)
		}
	}
	for _, c := range []struct{ name, file, value, want, unreadable string }{
		{"prompt", "", "my bootstrap_host is gone", "", "bootstrap_host"},
		{"file", "a.wav", `{"bootstrap_host":"h"}`, "", "bootstrap_host"},
		{"bootstrap_host", "", "h", "bootstrap_host", "bootstrap_host"},
		{"bootstrap_host", "a", "h", "bootstrap_host", "bootstrap_host"},
		{"vllm_xargs", "", `{"kv_\u0074ransfer_params":"h"}`, "vllm_xargs.kv_transfer_params", "kv_transfer_params"},
		{"vllm_xargs", "", `{"ngram_size":1}`, "", ""},
	} {
		kind, body := form(c.name, c.file, c.value)
		check(kind, body, c.want)
		check(kind+"x", body, c.unreadable)
	}
	check("application/x-www-form-urlencoded", []byte("model=m&vllm%5Fxargs=%7B%22remote_host%22:1%7D"), "vllm_xargs.remote_host")
	check("application/x-www-form-urlencoded", []byte("model=m"), "")
	check("text/plain", []byte(`{"a":NaN,"remote_\u0068ost":"h"}`), "remote_host")
	check("audio/wav", []byte(`RIFF"`), "")
	check("", nil, "")
}

func TestDropHeaders(t *testing.T) {
	header := http.Header{}
	for _, name := range []string{"x-prefiller-host-port", "X-KV-Cache-Source-Host-Port", "x_prefiller_host_port", "x-override-bootstrap-host", "X-Data_Parallel-Rank", "X-Data-Parallel-Rank", "Accept", "X-My_Header"} {
		header.Set(name, "1")
	}
	DropHeaders(header)
	var left []string
	for name := range header {
		left = append(left, name)
	}
	if slices.Sort(left); !slices.Equal(left, []string{"Accept", "X-Data-Parallel-Rank", "X-My_header"}) {
		t.Error(left)
	}
}

// frame is one frame of a client.
func frame(opcode byte, final bool, payload string) []byte {
	b := []byte{opcode}
	if final {
		b[0] |= 0x80
	}
	switch n := len(payload); {
	case n < 126:
		b = append(b, 0x80|byte(n))
	case n < 1<<16:
		b = binary.BigEndian.AppendUint16(append(b, 0x80|126), uint16(n))
	default:
		b = binary.BigEndian.AppendUint64(append(b, 0x80|127), uint64(n))
	}
	mask := []byte{7, 11, 13, 200}
	b = append(b, mask...)
	for i := range payload {
		b = append(b, payload[i]^mask[i%4])
	}
	return b
}

func TestFrames(t *testing.T) {
	long := strings.Repeat("A", 70_000)
	for name, c := range map[string]struct {
		frames [][]byte
		want   string
	}{
		"plain":                 {[][]byte{frame(1, true, `{"type":"session.update","model":"kv_transfer_params"}`)}, ""},
		"named":                 {[][]byte{frame(1, true, `{"type":"session.update","session":{"kv_transfer_params" : {"a":1}}}`)}, "kv_transfer_params"},
		"escaped":               {[][]byte{frame(1, true, `{"remote_\u0068ost":1}`)}, "remote_host"},
		"in a later message":    {[][]byte{frame(1, true, `{"audio":"`+long+`"}`), frame(9, true, `"bootstrap_host":`), frame(1, true, ""), frame(2, true, `{"bootstrap_host":1}`)}, "bootstrap_host"},
		"in parts":              {[][]byte{frame(1, false, `{"boot`), frame(9, true, "ping"), frame(0, false, ""), frame(0, true, `strap_host":1}`)}, "bootstrap_host"},
		"a message ends before": {[][]byte{frame(1, true, `"bootstrap_host"`), frame(1, true, `:1`)}, ""},
		"a long string":         {[][]byte{frame(1, true, `{"`+long[:300]+`bootstrap_host":1}`)}, ""},
		"of middle length":      {[][]byte{frame(1, true, `{"a":"`+long[:200]+`","dp_rank":1}`)}, "dp_rank"},
	} {
		t.Run(name, func(t *testing.T) {
			all := slices.Concat(c.frames...)
			for _, step := range []int{1, 7, len(all)} {
				var f Frames
				got, passed := "", 0
				for at := 0; at < len(all) && got == ""; at += step {
					var n int
					n, got = f.Take(all[at:min(at+step, len(all))])
					passed += n
				}
				if got != c.want || got == "" && passed != len(all) || got != "" && passed >= len(all)-1 {
					t.Errorf("steps of %d: %q after %d of %d bytes, want %q", step, got, passed, len(all), c.want)
				}
			}
		})
	}
}

func FuzzFrames(f *testing.F) {
	f.Add(frame(1, true, `{"bootstrap_host":1}`), 3)
	f.Add([]byte{0x81, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 2, 3, 4, 5}, 1)
	f.Fuzz(func(t *testing.T, b []byte, at int) {
		var whole, parts Frames
		n, name := whole.Take(b)
		at = min(max(at, 0), len(b))
		first, early := parts.Take(b[:at])
		second := 0
		if early == "" {
			second, early = parts.Take(b[at:])
		}
		if first+second != n || early != name {
			t.Errorf("%d %q at once, %d %q in parts", n, name, first+second, early)
		}
	})
}

func BenchmarkFind(b *testing.B) {
	body, _ := jsonbody.Parse([]byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", 20_000) + `"}],"stream":true,"max_tokens":64,"temperature":0.7,"stream_options":{"include_usage":true},"tools":[]}`))
	b.ReportAllocs()
	for b.Loop() {
		if Find(body) != "" {
			b.Fatal("it directs nothing")
		}
	}
}
