package selection

import (
	"encoding/json"
	"io"
	"net/http"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/models"
	"kvrouter/internal/router"
	"kvrouter/internal/web"
)

// Thresholds serves /busy_threshold, which is Dynamo's. It is a route of the
// OpenAI port, with that port's shape of errors.
type Thresholds struct {
	Models *models.Set
	Model  string // name under which the thresholds are shown
}

// thresholdsBody is the most that a body of /busy_threshold has, in bytes.
const thresholdsBody = 64 << 10

// modelThresholds is the form of /busy_threshold.
type modelThresholds struct {
	Model string `json:"model"`
	router.BusyThresholds
}

// Show answers GET with all thresholds that are set.
func (s Thresholds) Show(c *gin.Context) {
	thresholds := []modelThresholds{}
	if t := s.Models.BusyThresholds(); t.Set() {
		thresholds = append(thresholds, modelThresholds{s.Model, t})
	}
	c.JSON(http.StatusOK, gin.H{"thresholds": thresholds})
}

// Change answers POST: it changes the thresholds that the body names, which hold
// for every model, and answers with all of them.
func (s Thresholds) Change(c *gin.Context) {
	fail := func(status int, param, message string) {
		c.Header(web.HeaderRequest, web.RequestID(c))
		c.Data(status, "application/json", web.ErrorJSON(status, web.ErrorType(status), param, message))
	}
	body, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, thresholdsBody))
	if err != nil {
		fail(http.StatusBadRequest, "", "the request body could not be read: "+err.Error())
		return
	}
	var asked modelThresholds
	if err := json.Unmarshal(body, &asked); err != nil {
		fail(http.StatusBadRequest, "", "bad body: "+err.Error())
		return
	}
	if err := asked.Validate(); err != nil {
		fail(http.StatusBadRequest, "", err.Error())
		return
	}
	if _, known := s.Models.Of(asked.Model); asked.Model == "" || !known {
		fail(http.StatusNotFound, "model", "The model `"+asked.Model+"` does not exist.")
		return
	}
	c.JSON(http.StatusOK, modelThresholds{asked.Model, s.Models.ChangeBusyThresholds(asked.BusyThresholds)})
}
