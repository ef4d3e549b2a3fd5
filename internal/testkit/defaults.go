package testkit

import "github.com/alecthomas/kong"

// Defaults returns the settings of type T with the defaults of its flags.
func Defaults[T any]() (settings T) {
	parser, err := kong.New(&settings, kong.NoDefaultHelp())
	if err == nil {
		_, err = parser.Parse(nil)
	}
	if err != nil {
		panic(err) // the tags are wrong
	}
	return settings
}
