package web

// Names of the headers by which a client learns what was decided.
const (
	HeaderWorker  = "X-Kvrouter-Worker-Id"
	HeaderOverlap = "X-Kvrouter-Overlap-Tokens"
	HeaderRequest = "X-Request-Id"
)

// HeaderRank tells a vLLM worker which of its data-parallel ranks to use.
const HeaderRank = "X-Data-Parallel-Rank"

// HopByHop are the headers that belong to one connection, not to the message.
var HopByHop = []string{"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}
