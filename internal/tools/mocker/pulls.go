package mocker

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/tools/engine"
)

// peerPath answers which blocks another worker can pull. It stands for the side channel of
// vLLM's tier p2p, at the port for HTTP: the real one speaks NIXL.
const peerPath = "/mock/peer"

// peerTimeout bounds the question to another worker. Without an answer, the prompt is
// computed, as by vLLM.
const peerTimeout = 2 * time.Second

// peerQuestion asks how many of the blocks, from the first on, are in host memory.
type peerQuestion struct {
	ID     string   `json:"kv_request_id"`
	Blocks []uint64 `json:"blocks"`
}

type peerAnswer struct {
	Blocks int `json:"blocks"`
}

// pulls reports whether the mock workers pull from each other.
func (c *Settings) pulls() bool { return c.PeerBandwidth > 0 }

// findSource asks the worker that a request names as its source what it has of the prompt:
// kv_transfer_params.remote_kv_source, as vLLM's tier p2p reads it.
func (w *Worker) findSource(ctx context.Context, body *jsonbody.Body, answer *Answer) {
	source := body.Get("kv_transfer_params").Get("remote_kv_source")
	host, port, id := source.Get("remote_host").Str, source.Get("remote_port").String(), source.Get("kv_request_id").Str
	if !w.cfg.pulls() || host == "" || port == "" || id == "" || len(answer.choices) == 0 {
		return
	}
	if w.chance(w.cfg.PeerFailures) {
		return
	}
	request := answer.choices[0].request
	blocks := request.Blocks[:request.Prompt/w.cfg.BlockSize]
	question := peerQuestion{ID: id}
	for _, b := range blocks {
		question.Blocks = append(question.Blocks, b.Engine)
	}
	ctx, cancel := context.WithTimeout(ctx, peerTimeout)
	defer cancel()
	served, err := askPeer(ctx, net.JoinHostPort(host, port), question)
	if err != nil {
		w.log.Warn("mock worker: no answer from the source of a pull", "worker", w.number, "source", net.JoinHostPort(host, port), "error", err)
		return
	}
	request.Served, request.Peer = min(max(0, served), len(blocks)), w.cfg.Peers().Loads
}

// askPeer returns how many blocks the worker at an address serves.
func askPeer(ctx context.Context, address string, question peerQuestion) (int, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+peerPath, bytes.NewReader(MustJSON(question)))
	if err != nil {
		return 0, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return 0, &net.AddrError{Err: "status " + strconv.Itoa(response.StatusCode), Addr: address}
	}
	var answer peerAnswer
	err = json.NewDecoder(io.LimitReader(response.Body, 1<<10)).Decode(&answer)
	return answer.Blocks, err
}

// servePeer serves peerPath.
func (w *Worker) servePeer(out http.ResponseWriter, in *http.Request) {
	var question peerQuestion
	if !w.cfg.pulls() || json.NewDecoder(http.MaxBytesReader(out, in.Body, bodyLimit)).Decode(&question) != nil {
		http.Error(out, "this worker serves no others", http.StatusNotFound)
		return
	}
	blocks := make([]kv.StoredBlock, len(question.Blocks))
	for i, hash := range question.Blocks {
		blocks[i].Engine = hash
	}
	var answer peerAnswer
	asked := w.Ranks[0].Ask(in.Context(), func(e *engine.Engine) {
		for _, s := range e.Lower {
			if s.Tier == kv.Host {
				answer.Blocks = s.Leading(blocks)
			}
		}
	})
	if !asked {
		http.Error(out, "the worker ends", http.StatusServiceUnavailable)
		return
	}
	_, _ = out.Write(MustJSON(answer))
}
