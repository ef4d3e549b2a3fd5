package page

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"mime"
	"net/http"
	"net/http/pprof"
	"path"
	"strconv"
	"strings"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/web"
)

// root is the path of the page.
const root = "/ui"

// maxProfile bounds a profile, s.
const maxProfile = 60

//go:embed assets
var assets embed.FS

// Handler serves the page at / and /ui/.
func (p *Page) Handler() http.Handler { return p.routes(false) }

// Over serves the page and Go's profiles at /debug/pprof/, and passes all other
// requests to next.
func (p *Page) Over(next http.Handler) http.Handler {
	own := p.routes(true)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		at := r.URL.Path
		if at == "/" || at == root || strings.HasPrefix(at, root+"/") || strings.HasPrefix(at, "/debug/") {
			own.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (p *Page) routes(profiles bool) http.Handler {
	engine := web.NewEngine(p.log)
	engine.Use(web.Harden)
	engine.NoRoute(func(c *gin.Context) { fail(c, http.StatusNotFound, "not found: the dashboard is at /ui/") })
	engine.NoMethod(func(c *gin.Context) {
		fail(c, http.StatusMethodNotAllowed, fmt.Sprintf("%s does not accept %s", c.Request.URL.Path, c.Request.Method))
	})
	toPage := func(c *gin.Context) { // a proxy in front may have cut the path: the link is relative
		c.Header("Location", strings.TrimPrefix(root, "/")+"/")
		c.Status(http.StatusFound)
	}
	engine.GET("/", toPage)
	engine.HEAD("/", toPage)
	engine.GET(root, toPage)
	served(engine)

	own := engine.Group(root, web.OwnPages(p.settings.Host, p.settings.Keys.Asked(), fail))
	own.POST("/sign-in", ownScript, p.signIn)
	own.POST("/sign-out", ownScript, p.signOut)
	guarded := own.Group("/", p.admit)
	guarded.GET("/stream", p.stream)
	guarded.GET("/requests/*id", p.explain) // clients may put a slash into theirs
	changing := guarded.Group("/", ownScript, web.WantJSON(fail))
	changing.POST("/workers/:id/:action", p.act)
	changing.POST("/where", p.where)
	changing.POST("/try", p.try)
	if profiles {
		debug := engine.Group("/debug", web.OwnPages(p.settings.Host, p.settings.Keys.Asked(), fail),
			web.RequireKey(p.settings.Keys, "this requires the router port's key", fail))
		debug.GET("/vars", p.vars)
		debug.GET("/pprof/*name", profile) // a body might name seconds too
	}
	return engine
}

// served adds the page's files. They need no key: there is nothing of the router in
// them.
func served(engine *gin.Engine) {
	fs.WalkDir(assets, "assets", func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := assets.ReadFile(file)
		if err != nil {
			return err
		}
		kind := mime.TypeByExtension(path.Ext(file))
		switch path.Ext(file) { // the machine's table may say otherwise
		case ".js", ".mjs":
			kind = "text/javascript; charset=utf-8"
		case ".css":
			kind = "text/css; charset=utf-8"
		case ".html":
			kind = "text/html; charset=utf-8"
		case ".svg":
			kind = "image/svg+xml"
		case ".txt", ".md", "":
			kind = "text/plain; charset=utf-8"
		}
		sum := sha256.Sum256(content)
		tag := `"` + hex.EncodeToString(sum[:12]) + `"`
		name := strings.TrimSuffix(strings.TrimPrefix(file, "assets"), "/index.html")
		serve := func(c *gin.Context) {
			c.Header("ETag", tag)
			c.Header("Cache-Control", "no-cache")
			if c.GetHeader("If-None-Match") == tag {
				c.Status(http.StatusNotModified)
				return
			}
			c.Data(http.StatusOK, kind, content)
		}
		if name == "" {
			name = "/"
		}
		engine.GET(root+name, serve)
		engine.HEAD(root+name, serve)
		return nil
	})
}

// fail answers with an error as the router port does.
func fail(c *gin.Context, status int, message string) { c.JSON(status, gin.H{"error": message}) }

// explain shows why a request went where it did.
func (p *Page) explain(c *gin.Context) {
	receipt, ok := p.requests.receipt(strings.TrimPrefix(c.Param("id"), "/"))
	if !ok {
		fail(c, http.StatusNotFound, fmt.Sprintf("this request is not among the last %d", maxRequests))
		return
	}
	c.JSON(http.StatusOK, receipt)
}

// profile serves Go's profiles, of a bounded time.
func profile(c *gin.Context) {
	if text, given := c.GetQuery("seconds"); given {
		if n, err := strconv.Atoi(text); err != nil || n < 1 || n > maxProfile {
			fail(c, http.StatusBadRequest, fmt.Sprintf("seconds must be a number from 1 to %d", maxProfile))
			return
		}
	}
	// What reads the seconds looks for them in a body, too.
	c.Request.Body, c.Request.Form = http.NoBody, c.Request.URL.Query()
	c.Request.Header.Del("Content-Type")
	switch strings.Trim(c.Param("name"), "/") {
	case "profile":
		pprof.Profile(c.Writer, c.Request)
	case "trace":
		pprof.Trace(c.Writer, c.Request)
	case "symbol":
		pprof.Symbol(c.Writer, c.Request)
	case "cmdline": // its arguments may have keys
		fail(c, http.StatusNotFound, "the command line is not shown")
	default:
		pprof.Index(c.Writer, c.Request)
	}
}
