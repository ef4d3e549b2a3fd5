package replica

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// A sealed message is a salt that its sender drew at its start, the time at which
// it was sent (ns since 1970, each later than the one before), and the text by
// AES-256-GCM, whose key is an HMAC of the salt under the shared key, whose
// nonce is the time, and which covers the topic, too. So only a holder of the key can read
// or write it, and it is accepted once.
const (
	saltSize  = 16
	stampSize = 8
	// sealWindow is how far two routers' clocks may be apart.
	sealWindow = 30 * time.Second
	// maxSenders bounds the salts heard at one address within the window. Each is that of
	// a router which has started there.
	maxSenders = 64
	// keySize is the least length of a shared key, bytes: a listener can
	// try keys on it.
	keySize = 16
)

// seal closes this router's messages. One goroutine uses it.
type seal struct {
	key  []byte // nil: messages are not sealed
	now  func() time.Time
	salt [saltSize]byte
	aead cipher.AEAD
	last int64 // time of the last message
}

// newSeal returns a seal under a shared key.
func newSeal(key string) (*seal, error) {
	s := &seal{key: []byte(key), now: time.Now}
	rand.Read(s.salt[:])
	var err error
	s.aead, err = derive(s.key, s.salt)
	return s, err
}

// derive returns the cipher of one sender.
func derive(key []byte, salt [saltSize]byte) (cipher.AEAD, error) {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte("kvrouter replica"))
	mac.Write(salt[:])
	block, err := aes.NewCipher(mac.Sum(nil))
	if err != nil {
		return nil, fmt.Errorf("--replica-key: %w", err)
	}
	return cipher.NewGCM(block)
}

// nonce is the time of a message in the form that the cipher takes.
func nonce(stamp int64) []byte {
	return binary.BigEndian.AppendUint64(make([]byte, 4, 12), uint64(stamp))
}

// close seals a message of a topic; without a seal (nil) it stays as it is.
func (s *seal) close(topic string, text []byte) []byte {
	if s == nil {
		return text
	}
	s.last = max(s.last+1, s.now().UnixNano())
	out := binary.BigEndian.AppendUint64(s.salt[:saltSize:saltSize], uint64(s.last))
	return s.aead.Seal(out, nonce(s.last), text, []byte(topic))
}

// opener opens the messages that come from one address, over all connections to it. One
// goroutine uses it.
type opener struct {
	key     []byte // nil: messages are not sealed
	now     func() time.Time
	senders map[[saltSize]byte]sender // those of the last sealWindow
}

// sender is what is known of the router that drew a salt.
type sender struct {
	aead cipher.AEAD
	last int64 // time of its last message; earlier ones are replays
}

// expire forgets the senders whose last message is too old to be accepted again.
func (o *opener) expire() {
	maps.DeleteFunc(o.senders, func(_ [saltSize]byte, s sender) bool {
		return o.now().Sub(time.Unix(0, s.last)) > sealWindow
	})
}

// errSealed and errUnsealed say that only one of two routers has a key.
var (
	errSealed   = errors.New("its messages are encrypted or malformed: if it has a --replica-key, set it here, too")
	errUnsealed = errors.New("its messages are not encrypted with our --replica-key")
)

// open returns the text of a message of a topic, which it checks.
func (o *opener) open(topic string, message []byte) ([]byte, error) {
	if o.key == nil {
		if len(message) > 0 && message[0]&0xf0 != msgpcode.FixedMapLow { // all topics' maps are small
			return nil, errSealed
		}
		return message, nil
	}
	if len(message) < saltSize+stampSize {
		return nil, errUnsealed
	}
	salt := [saltSize]byte(message)
	from, known := o.senders[salt]
	if !known {
		var err error
		if from.aead, err = derive(o.key, salt); err != nil {
			return nil, err
		}
	}
	stamp := int64(binary.BigEndian.Uint64(message[saltSize:]))
	text, err := from.aead.Open(nil, nonce(stamp), message[saltSize+stampSize:], []byte(topic))
	if err != nil {
		return nil, errUnsealed
	}
	if age := o.now().Sub(time.Unix(0, stamp)).Abs(); age > sealWindow || stamp <= from.last {
		return nil, fmt.Errorf("message is %s old or was replayed: clocks must agree within %s", age.Round(time.Millisecond), sealWindow)
	}
	if !known {
		if o.expire(); len(o.senders) >= maxSenders {
			return nil, fmt.Errorf("more than %d routers have started at its address within %s", maxSenders, sealWindow)
		}
		if o.senders == nil {
			o.senders = map[[saltSize]byte]sender{}
		}
	}
	from.last = stamp
	o.senders[salt] = from
	return text, nil
}

// opener returns what opens the messages that come from one address.
func (z *zmqLink) opener() *opener {
	o := &opener{now: time.Now}
	if z.seal != nil {
		o.key = z.seal.key
	}
	return o
}
