package openai

import (
	"encoding/json"
	"net/http"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
)

// thresholdsBody is the most that a body of /busy_threshold has, in bytes.
const thresholdsBody = 64 << 10

// modelThresholds is the form of /busy_threshold.
type modelThresholds struct {
	Model string `json:"model"`
	router.BusyThresholds
}

// serveThresholds adds Dynamo's /busy_threshold. It needs the router port's key or, if
// there is none, a trusted client's.
func (a *API) serveThresholds() {
	operators := a.operators("/busy_threshold", a.settings.RouterKeys)
	operators.GET("/busy_threshold", a.showThresholds)
	operators.POST("/busy_threshold", web.WantJSON(web.Fail), a.changeThresholds)
}

// operators returns a group of routes that need one of those keys of the router port or, if there are none, that of a
// trusted client. what names them.
func (a *API) operators(what string, routerKeys *web.Keys) gin.IRoutes {
	group := a.engine.Group("/", web.OwnPages(a.settings.Host, routerKeys.Asked(), web.Fail),
		web.RequireKey(routerKeys, what+" needs a key of the router port (--router-api-key)", web.Fail))
	if !routerKeys.Asked() {
		group.Use(a.keys.Guard(web.Fail), a.keys.Trusted(web.Fail))
	}
	return group
}

// showThresholds answers with all thresholds that are set.
func (a *API) showThresholds(c *gin.Context) {
	thresholds := []modelThresholds{}
	if t := a.models.BusyThresholds(); t.Set() {
		thresholds = append(thresholds, modelThresholds{a.settings.ServedModelName, t})
	}
	c.JSON(http.StatusOK, gin.H{"thresholds": thresholds})
}

// changeThresholds changes the thresholds that the body names, which apply to every
// model, and answers with all of them.
func (a *API) changeThresholds(c *gin.Context) {
	body, ok := a.smallBody(c, thresholdsBody)
	if !ok {
		return
	}
	var asked modelThresholds
	if err := json.Unmarshal(body, &asked); err != nil {
		a.fail(c, http.StatusBadRequest, "", "invalid body: "+err.Error())
		return
	}
	if err := asked.Validate(); err != nil {
		a.fail(c, http.StatusBadRequest, "", err.Error())
		return
	}
	if _, known := a.models.Of(asked.Model); asked.Model == "" || !known {
		a.fail(c, http.StatusNotFound, "model", "The model `"+asked.Model+"` does not exist.")
		return
	}
	c.JSON(http.StatusOK, modelThresholds{asked.Model, a.models.ChangeBusyThresholds(asked.BusyThresholds)})
}
