package page

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
)

const (
	// cookieName names the cookie of those who have signed in.
	cookieName = "kvrouter_session"
	// sessionLife is the time that a sign-in is valid, and maxSessions how many are at once:
	// of more, the oldest ends.
	sessionLife = 12 * time.Hour
	maxSessions = 256
	// signInLimit bounds the body of a sign-in, bytes.
	signInLimit = 4 << 10
	// headerPage must come with what changes something: a page of another site cannot
	// set it.
	headerPage = "X-Kvrouter-Page"
)

// sessions are the valid sign-ins.
type sessions struct {
	mu   sync.Mutex           // guards open
	open map[string]time.Time // end of validity, by the cookie's value
}

func newSessions() *sessions { return &sessions{open: map[string]time.Time{}} }

// begin returns the cookie's value for a new session.
func (s *sessions) begin(now time.Time) string {
	var random [32]byte
	rand.Read(random[:])
	id := base64.RawURLEncoding.EncodeToString(random[:])
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.open) >= maxSessions {
		oldest := ""
		for other, until := range s.open {
			if oldest == "" || until.Before(s.open[oldest]) {
				oldest = other
			}
		}
		delete(s.open, oldest)
	}
	s.open[id] = now.Add(sessionLife)
	return id
}

// holds reports whether the session is valid.
func (s *sessions) holds(id string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	until, known := s.open[id]
	if known && !now.Before(until) {
		delete(s.open, id)
	}
	return known && now.Before(until)
}

// end ends a session.
func (s *sessions) end(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, id)
}

// admit refuses requests that show neither a key nor a session, where one is asked
// for.
func (p *Page) admit(c *gin.Context) {
	if !p.settings.Keys.Asked() || p.settings.Keys.Holds(c.Request) {
		return
	}
	if id, err := c.Cookie(cookieName); err == nil && p.sessions.holds(id, p.now()) {
		return
	}
	p.settings.Keys.Refuse(c, "sign in with the router port's key, or give it with the request", fail)
}

// ownScript refuses requests not sent by the page's own script.
func ownScript(c *gin.Context) {
	if c.GetHeader(headerPage) != "1" {
		fail(c, http.StatusForbidden, "send the header "+headerPage+": 1")
		c.Abort()
	}
}

// signIn exchanges a valid key for a cookie.
func (p *Page) signIn(c *gin.Context) {
	if !p.settings.Keys.Asked() {
		c.Status(http.StatusNoContent)
		return
	}
	key, ok := readKey(http.MaxBytesReader(c.Writer, c.Request.Body, signInLimit))
	switch {
	case !ok:
		fail(c, http.StatusBadRequest, `the body must be {"key":"..."}`)
	case !p.settings.Keys.Known(key):
		p.settings.Keys.RefuseKey(c, key, "this is not the router port's key", fail)
	default:
		p.setCookie(c, p.sessions.begin(p.now()), int(sessionLife.Seconds()))
		c.Status(http.StatusNoContent)
	}
}

// readKey reads the body of a sign-in.
func readKey(body io.Reader) (key string, ok bool) {
	var given struct {
		Key *string `json:"key"`
	}
	text, err := io.ReadAll(body)
	if err != nil || json.Unmarshal(text, &given) != nil || given.Key == nil {
		return "", false
	}
	return *given.Key, true
}

func (p *Page) signOut(c *gin.Context) {
	if id, err := c.Cookie(cookieName); err == nil {
		p.sessions.end(id)
	}
	p.setCookie(c, "", -1)
	c.Status(http.StatusNoContent)
}

// setCookie names no path, so that browsers take that of the page: the folder of what was
// requested, also behind a proxy that has cut a prefix from it.
func (p *Page) setCookie(c *gin.Context, value string, age int) {
	http.SetCookie(c.Writer, &http.Cookie{Name: cookieName, Value: value, MaxAge: age, HttpOnly: true, Secure: p.settings.Secure,
		SameSite: http.SameSiteStrictMode})
}
