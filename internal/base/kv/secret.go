package kv

// Secret is a key that is never shown: printed, logged or encoded it reads as three
// asterisks, or as nothing if it is empty.
type Secret string

// String hides the key.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return "***"
}

// GoString hides the key from %#v.
func (s Secret) GoString() string { return `"` + s.String() + `"` }

// MarshalText hides the key from encoders.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }
