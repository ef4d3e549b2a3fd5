package health

// Kind is the kind of a worker's failure.
type Kind uint8

// The kinds.
const (
	Reported      Kind = iota // reported by the sender of the request
	Refused                   // no connection
	Dropped                   // the connection broke without an answer
	Timeout                   // no byte for too long
	Status                    // an HTTP status that reports a server error
	Broken                    // an incomplete answer
	Engine                    // an answer that reports a failed engine
	Stuck                     // no sign of life for longer than its work explains
	Asked                     // a request for prompt tokens was not answered
	Misconfigured             // it refuses requests that others accept
	kinds
)

var kindNames = [kinds]string{
	Reported: "reported", Refused: "refused", Dropped: "dropped", Timeout: "timeout", Status: "status", Broken: "broken", Engine: "engine",
	Stuck: "stuck", Asked: "unanswered", Misconfigured: "misconfigured",
}

// String returns the kind's name, which is a metric label.
func (k Kind) String() string { return kindNames[k] }

// ofServer reports whether the kind is the fault of a worker's HTTP server, which all
// its data-parallel ranks share.
func (k Kind) ofServer() bool {
	return k == Refused || k == Dropped || k == Misconfigured || k == Asked
}

// dependsOnRequest reports whether the request itself may be the cause: the worker has read
// it, and no other worker has accepted it.
func (k Kind) dependsOnRequest() bool { return k != Refused && k != Misconfigured }

// atOnce reports whether a single such failure ejects a worker.
func (k Kind) atOnce() bool { return k == Stuck || k == Misconfigured }
