package web

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"
)

// Where the known clients put a key, beside the header Authorization.
const (
	headerAnthropic = "X-Api-Key"
	headerAzure     = "Api-Key"
	// protocolKey precedes the key among the protocols of a WebSocket, where OpenAI's
	// clients in browsers put it.
	protocolKey = "openai-insecure-api-key."
	// queryAzure is the query parameter of Azure's, and queryToken the one with a token.
	queryAzure, queryToken = "api-key", "authorization"
)

// HeaderProtocol has the protocols that a WebSocket offers, and the one that was chosen.
const HeaderProtocol = "Sec-Websocket-Protocol"

// keyHeaders are the headers that have nothing but a key.
var keyHeaders = []string{"Authorization", headerAnthropic, headerAzure}

// askedKey says in errors how a key is sent.
const askedKey = "send it as Authorization: Bearer KEY, x-api-key: KEY or api-key: KEY"

// AskForKey returns the message of a 401, and sets the header that such an answer must have
// (RFC 9110, section 15.5.2). why begins the message.
func AskForKey(c *gin.Context, why string) string {
	c.Header("WWW-Authenticate", `Bearer realm="kvrouter"`)
	return why + ": " + askedKey
}

// KeysOf returns the keys that a request gives, without repetitions: of each header the first
// one. Only a WebSocket may give one among its protocols or in its query, because browsers cannot
// set its headers.
func KeysOf(r *http.Request) (given []string) {
	add := func(key string) {
		if key != "" && !slices.Contains(given, key) {
			given = append(given, key)
		}
	}
	for _, name := range keyHeaders {
		add(bearer(r.Header.Get(name)))
	}
	if !Names(r.Header["Upgrade"], "websocket") {
		return given
	}
	for _, protocol := range protocols(r.Header) {
		if isKey(protocol) {
			add(protocol[len(protocolKey):])
		}
	}
	if r.URL.RawQuery != "" {
		add(r.URL.Query().Get(queryAzure))
	}
	return given
}

// bearer returns the key of a header. The case of the scheme does not matter (RFC 9110,
// section 11.1). A value without a scheme is the key.
func bearer(value string) string {
	scheme, key, _ := strings.Cut(value, " ")
	if strings.EqualFold(scheme, "Bearer") {
		return strings.TrimLeft(key, " ")
	}
	return value
}

// protocols returns the protocols that a WebSocket offers.
func protocols(header http.Header) (offered []string) {
	for _, value := range header[HeaderProtocol] {
		for protocol := range strings.SplitSeq(value, ",") {
			if protocol = strings.TrimSpace(protocol); protocol != "" {
				offered = append(offered, protocol)
			}
		}
	}
	return offered
}

func isKey(protocol string) bool {
	return len(protocol) >= len(protocolKey) && strings.EqualFold(protocol[:len(protocolKey)], protocolKey)
}

// FirstProtocol returns the first protocol that a WebSocket offers; empty: none.
func FirstProtocol(header http.Header) string {
	for _, protocol := range protocols(header) {
		if !isKey(protocol) {
			return protocol
		}
	}
	return ""
}

// DropKeys removes keys from the headers of a request, in whatever form.
func DropKeys(header http.Header) {
	for _, name := range keyHeaders {
		delete(header, name)
	}
	if offered := protocols(header); slices.ContainsFunc(offered, isKey) {
		delete(header, HeaderProtocol)
		if rest := slices.DeleteFunc(offered, isKey); len(rest) > 0 {
			header.Set(HeaderProtocol, strings.Join(rest, ", "))
		}
	}
}

// CopyKeys adds the keys in the headers of a request to those of another one.
func CopyKeys(to, from http.Header) {
	for _, name := range keyHeaders {
		if values, given := from[name]; given {
			to[name] = values
		}
	}
}

// WithoutKeys returns a URL's query without the parameters that give a key.
func WithoutKeys(query string) string {
	if query == "" {
		return ""
	}
	kept := make([]string, 0, 4)
	for parameter := range strings.SplitSeq(query, "&") {
		name, _, _ := strings.Cut(parameter, "=")
		if plain, err := url.QueryUnescape(name); err == nil {
			name = plain
		}
		if !strings.EqualFold(name, queryAzure) && !strings.EqualFold(name, queryToken) {
			kept = append(kept, parameter)
		}
	}
	return strings.Join(kept, "&")
}
