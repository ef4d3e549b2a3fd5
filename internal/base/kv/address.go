package kv

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"unicode"
)

// maxAddress bounds a URL or an endpoint, bytes.
const maxAddress = 2048

// ErrUserinfo refuses a URL with a password, without showing it.
var ErrUserinfo = errors.New("the URL must not contain a user or password, because it appears in the list of workers. Give the key as " +
	"key-env=NAME, or as api_key in POST /workers")

// ParseURL checks a worker's base URL and returns it without a slash at the end.
func ParseURL(value string) (string, error) {
	if len(value) > maxAddress {
		return "", fmt.Errorf("the URL has %d bytes, at most %d are allowed", len(value), maxAddress)
	}
	u, err := url.Parse(value)
	if err == nil && u.User != nil || err != nil && strings.Contains(value, "@") {
		return "", ErrUserinfo
	}
	if !strings.Contains(value, "://") {
		if whole, err := ParseURL("http://" + value); err == nil {
			return "", fmt.Errorf("%s is not a URL such as http://host:8100: give %s", value, whole)
		}
	}
	wrong := fmt.Errorf("%s is not a URL such as http://host:8100", value)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "" || strings.ContainsAny(value, "?#") {
		return "", wrong
	}
	if _, ok := ParsePort(u.Port()); !ok && u.Port() != "" {
		return "", wrong
	}
	if base, _, api := strings.Cut(value+"/", "/v1/"); api {
		return "", fmt.Errorf("%s: the router adds /v1 itself: give %s", value, base)
	}
	return strings.TrimRight(value, "/"), nil
}

// ParsePort reads the number of a port. Not ok: it is none from 1 to 65535.
func ParsePort(text string) (port uint16, ok bool) {
	number, err := strconv.ParseUint(text, 10, 16)
	if err != nil || number == 0 {
		return 0, false
	}
	return uint16(number), true
}

// ParseEndpoint checks an address that the router connects to.
func ParseEndpoint(value string) (string, error) {
	if len(value) > maxAddress {
		return "", fmt.Errorf("the endpoint has %d bytes, at most %d are allowed", len(value), maxAddress)
	}
	if strings.ContainsFunc(value, func(r rune) bool { return unicode.IsSpace(r) || unicode.IsControl(r) }) {
		return "", fmt.Errorf("%q is not an endpoint such as tcp://host:5557: it contains whitespace", value)
	}
	if path, ok := strings.CutPrefix(value, "ipc://"); ok && path != "" {
		return value, nil
	}
	host, port, err := net.SplitHostPort(strings.TrimPrefix(value, "tcp://"))
	_, ok := ParsePort(port)
	if !strings.HasPrefix(value, "tcp://") || err != nil || !ok || host == "" || host == "*" {
		return "", fmt.Errorf("%s is not an endpoint such as tcp://host:5557", value)
	}
	return value, nil
}
