package nativeapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/kv"
	"kvrouter/internal/models"
	"kvrouter/internal/proxy"
	"kvrouter/internal/tokens"
	"kvrouter/internal/web"
)

// Short are the routes of the OpenAI port for which no worker is chosen: models,
// tokens and stored responses. All fields but ModelName must be set.
type Short struct {
	Models    *models.Set
	Proxy     *proxy.Proxy
	ModelName string // listed while no worker is up; empty: none
	// Question is a client's request as it goes to workers.
	Question func(c *gin.Context, body []byte) proxy.Question
	// Body reads a request's body; not ok: it has been answered. Else Done must follow.
	Body func(c *gin.Context) (body []byte, ok bool)
	Done func(body []byte)
	// Told tells whether the client may know which worker answered.
	Told func(c *gin.Context) bool
	// Fail answers with an error in OpenAI's shape.
	Fail func(c *gin.Context, status int, param, message string)
}

// Serve adds the routes to those of clients.
func (a Short) Serve(clients gin.IRoutes) {
	clients.GET("/v1/models", a.listModels)
	clients.GET("/v1/models/:model", a.listModels)
	clients.POST("/tokenize", a.tokenized((*tokens.Source).Tokenize))
	clients.POST("/detokenize", a.tokenized((*tokens.Source).Detokenize))
	clients.GET("/v1/responses/:id", a.broadcastUntilFound)
	clients.POST("/v1/responses/:id/cancel", a.broadcastUntilFound)
}

// tokenized serves a route that only the tokenizer is needed for.
func (a Short) tokenized(serve func(*tokens.Source, context.Context, []byte) ([]byte, error)) gin.HandlerFunc {
	return func(c *gin.Context) {
		body, ok := a.Body(c)
		if !ok {
			return
		}
		defer a.Done(body)
		m, _ := a.Models.Of(gjson.GetBytes(body, "model").String())
		answer, err := serve(m.Tokens, c.Request.Context(), body)
		var bad *tokens.BadRequest
		var refused *tokens.AskError
		switch {
		case errors.As(err, &bad):
			a.Fail(c, http.StatusBadRequest, "", bad.Error())
		case errors.As(err, &refused):
			c.Data(refused.Status, "application/json", refused.Answer)
		case err != nil:
			a.Fail(c, http.StatusServiceUnavailable, "", err.Error())
		default:
			c.Data(http.StatusOK, "application/json", answer)
		}
	}
}

// listModels lists what the workers serve; while none is up, the name that is
// configured.
func (a Short) listModels(c *gin.Context) {
	list := a.Proxy.Models(c.Request.Context(), kv.OnePerWorker(a.Models.Targets()), a.Question(c, nil).Header)
	if len(list) == 0 && a.ModelName != "" {
		list = append(list, proxy.ModelCard(a.ModelName))
	}
	if name := c.Param("model"); name != "" {
		for _, m := range list {
			if gjson.GetBytes(m, "id").String() == name {
				c.Data(http.StatusOK, "application/json", m)
				return
			}
		}
		a.Fail(c, http.StatusNotFound, "model", fmt.Sprintf("The model `%s` does not exist.", name))
		return
	}
	c.JSON(http.StatusOK, gin.H{"object": "list", "data": list})
}

// broadcastUntilFound asks all workers for something that only one of them holds: a
// stored response.
func (a Short) broadcastUntilFound(c *gin.Context) {
	found := false
	a.Proxy.AskAll(c.Request.Context(), kv.OnePerWorker(a.Models.Targets()), a.Question(c, nil), func(answer proxy.Answer) bool {
		if found = answer.Err == nil && answer.Status != http.StatusNotFound; found {
			if a.Told(c) {
				c.Header(web.HeaderWorker, a.Models.Names().Label(answer.Target.Key.Worker))
			}
			c.Data(answer.Status, "application/json", answer.Body)
		}
		return !found
	})
	if !found {
		a.Fail(c, http.StatusNotFound, "", "no worker knows this response")
	}
}
