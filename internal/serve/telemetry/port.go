package telemetry

import (
	"fmt"
	"log/slog"
	"net/http"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/web"
)

// MaxPortClients is the maximum number of connections to the metrics port.
const MaxPortClients = 64

// Flags are the settings of the metrics port.
type Flags struct {
	MetricsHost string `group:"Addresses" default:"127.0.0.1" help:"Listen address of --metrics-port. Anyone who can reach this port can read the names of keys and tenants."`
	MetricsPort int    `group:"Addresses" default:"0" help:"Port that serves only /metrics: without a key, and with the metrics of keys and tenants, which the OpenAI port leaves out. 0 opens none."`
}

// Port serves the metrics port: the whole page, without a key. host is the address of the port.
func (t *Metrics) Port(host string, log *slog.Logger) http.Handler {
	fail := func(c *gin.Context, status int, message string) { c.JSON(status, gin.H{"error": message}) }
	engine := web.NewEngine(log)
	engine.NoRoute(func(c *gin.Context) { fail(c, http.StatusNotFound, "not found: this port serves /metrics") })
	engine.NoMethod(func(c *gin.Context) {
		fail(c, http.StatusMethodNotAllowed, fmt.Sprintf("%s does not accept %s", c.Request.URL.Path, c.Request.Method))
	})
	engine.GET("/metrics", web.OwnPages(host, false, fail), gin.WrapH(t.Handler()))
	return engine
}
