package discovery

import "strings"

// maxName bounds the name of a worker, bytes: the longest that a Pod or a host may have.
const maxName = 253

// strayInName reports a character that does not stand for itself everywhere where names
// are shown: headers, labels of metrics, lines of a log.
func strayInName(r rune) bool { return r < ' ' || r > '~' || strings.ContainsRune("\"'`\\,;", r) }

// plainName is a name from outside, made fit to be shown: bounded, and with an
// underscore for each character that is not. It may be empty.
func plainName(given string) string {
	name := strings.Map(func(r rune) rune {
		if strayInName(r) {
			return '_'
		}
		return r
	}, given[:min(len(given), maxName)])
	return strings.TrimSpace(name)
}
