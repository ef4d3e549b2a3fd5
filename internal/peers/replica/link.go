package replica

import "context"

// Link carries the messages of a router to the others of its mesh, and theirs to it. They may be
// lost, come twice, late, or in another order.
type Link interface {
	// Publish sends a message of a topic to all others. It never waits.
	Publish(topic string, text []byte)
	// Limit is the largest message, bytes.
	Limit() int
	// Followed reports whether anyone may hear what is published.
	Followed() bool
	// Joined returns how many have begun to hear this router so far, as far as the link knows. They
	// are sent all that is in flight at once; others ask for it when they hear a digest.
	Joined() uint64
	// Network returns the state of the link. It waits for no other router.
	Network() Network
	// Run hands to ears what the others send, until ctx is done.
	Run(ctx context.Context, ears Ears)
	// Close ends publishing. It is called once, after Run if that was.
	Close()
}

// Ears take what a Link hears; from names its sender as long as that is there. Their methods may
// be called by several goroutines.
type Ears interface {
	// Take takes a message. The text may be used again afterwards. Its error is why the message
	// changes nothing.
	Take(from, topic string, text []byte) error
	// Alive notes that a sender that is no kvrouter lives, which sends no digests.
	Alive(from string)
	// Gone notes that nothing more comes from a sender.
	Gone(from string)
}
