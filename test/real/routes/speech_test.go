package routes

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"mime/multipart"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// speechTokens are what a speech model adds to the vocabulary of the test model.
var speechTokens = map[string]string{"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}

// speechFolder writes a speech model of Qwen3-ASR's form, whose weights are made up.
func speechFolder(t *testing.T, architecture string) string {
	t.Helper()
	folder := t.TempDir()
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	write := func(name string, value any) {
		text, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		testkit.WriteFile(t, filepath.Join(folder, name), string(text))
	}
	testkit.WriteFile(t, filepath.Join(folder, "config.json"), strings.Replace(read("test/real/routes/testdata/speech.json"), "ARCHITECTURE", architecture, 1))

	var tokenizer map[string]any
	if err := json.Unmarshal([]byte(read(filepath.Join(test.ModelFolder(), "tokenizer.json"))), &tokenizer); err != nil {
		t.Fatal(err)
	}
	added := tokenizer["added_tokens"].([]any)
	for i, token := range []string{"<|audio_pad|>", "<|audio_start|>", "<|audio_end|>", "<asr_text>"} {
		added = append(added, map[string]any{"id": 49152 + i, "content": token, "special": token != "<asr_text>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
	}
	tokenizer["added_tokens"] = added
	write("tokenizer.json", tokenizer)
	write("tokenizer_config.json", map[string]any{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "extra_special_tokens": speechTokens, "processor_class": "Qwen3ASRProcessor"})
	write("preprocessor_config.json", map[string]any{"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "chunk_length": 30, "processor_class": "Qwen3ASRProcessor"})
	write("processor_config.json", map[string]any{"processor_class": "Qwen3ASRProcessor"})
	testkit.WriteFile(t, filepath.Join(folder, "chat_template.jinja"), read(filepath.Join(test.ModelFolder(), "chat_template.jinja")))
	return folder
}

// tone returns seconds of a tone, PCM of 16 bits at 16 kHz.
func tone(seconds int) []byte {
	const rate = 16000
	var pcm []byte
	for i := range seconds * rate {
		pcm = binary.LittleEndian.AppendUint16(pcm, uint16(int16(8000*math.Sin(2*math.Pi*440*float64(i)/rate))))
	}
	return pcm
}

// wave returns a file of that tone.
func wave(pcm []byte) []byte {
	var w bytes.Buffer
	w.WriteString("RIFF")
	binary.Write(&w, binary.LittleEndian, uint32(36+len(pcm)))
	w.WriteString("WAVEfmt ")
	for _, field := range []any{uint32(16), uint16(1), uint16(1), uint32(16000), uint32(32000), uint16(2), uint16(16)} {
		binary.Write(&w, binary.LittleEndian, field)
	}
	w.WriteString("data")
	binary.Write(&w, binary.LittleEndian, uint32(len(pcm)))
	w.Write(pcm)
	return w.Bytes()
}

// TestRoutesOfASpeechModel transcribes and translates a file, whole and streamed.
func TestRoutesOfASpeechModel(t *testing.T) {
	s := startSpeech(t, "Qwen3ASRForConditionalGeneration")
	both := bothOf(t, s)
	for _, route := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
		for _, stream := range []string{"false", "true"} {
			both.same(route+" stream="+stream, http.StatusOK, func(base string) (int, string) { return transcribe(t, base+route, stream) })
		}
	}
}

// transcribe sends a file as a form.
func transcribe(t *testing.T, url, stream string) (status int, answer string) {
	t.Helper()
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	file, _ := form.CreateFormFile("file", "tone.wav")
	file.Write(wave(tone(2)))
	for name, value := range map[string]string{"model": "m", "language": "en", "to_language": "en", "temperature": "0", "stream": stream, "max_completion_tokens": "16"} {
		form.WriteField(name, value)
	}
	form.Close()
	status, text := test.PostAs(t, url, form.FormDataContentType(), &body)
	return status, plain(text)
}

// TestRealtimeOfASpeechModel holds one conversation over a WebSocket.
func TestRealtimeOfASpeechModel(t *testing.T) {
	s := startSpeech(t, "Qwen3ASRRealtimeGeneration")
	both := bothOf(t, s)
	both.same("/v1/realtime", http.StatusOK, func(base string) (int, string) { return http.StatusOK, converse(t, base) })
}

// converse speaks for seven seconds in pieces of a second, and returns the text and usage that
// it is answered.
func converse(t *testing.T, base string) string {
	t.Helper()
	conn, err := websocket.Dial(strings.Replace(base, "http", "ws", 1)+"/v1/realtime?model=m", "", base)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(2 * time.Minute))
	send := func(event map[string]any) {
		if err := websocket.JSON.Send(conn, event); err != nil {
			t.Fatal(err)
		}
	}
	send(map[string]any{"type": "session.update", "model": "m"})
	send(map[string]any{"type": "input_audio_buffer.commit"})
	pcm := tone(7)
	for len(pcm) > 0 {
		send(map[string]any{"type": "input_audio_buffer.append", "audio": base64.StdEncoding.EncodeToString(pcm[:32000])})
		pcm = pcm[32000:]
	}
	send(map[string]any{"type": "input_audio_buffer.commit", "final": true})
	said, created := "", false
	for {
		var event struct {
			Type, Delta, Text, Error string
			Usage                    map[string]any
		}
		if err := websocket.JSON.Receive(conn, &event); err != nil {
			t.Fatalf("after %q: %v", said, err)
		}
		switch event.Type {
		case "session.created":
			created = true
		case "transcription.delta":
			said += event.Delta
		case "transcription.done":
			if !created || said != event.Text {
				t.Errorf("session created %v; deltas %q; text %q", created, said, event.Text)
			}
			return fmt.Sprint(event.Text, event.Usage)
		default:
			t.Fatalf("after %q: %+v", said, event)
		}
	}
}

// startSpeech starts a router with one vLLM worker of a speech model.
func startSpeech(t *testing.T, architecture string) *test.Router {
	return test.StartEngines(t, 1, []string{"PYTHONPATH=" + packages(t)}, "--model="+speechFolder(t, architecture), "--served-model-name=m", "--", "--load-format", "dummy", "--max-model-len", "2048", "--num-gpu-blocks-override", "60")
}
