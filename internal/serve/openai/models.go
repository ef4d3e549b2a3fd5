package openai

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/proxy"
)

// tokenized serves a route that needs only the tokenizer.
func (a *API) tokenized(serve func(*tokens.Source, context.Context, []byte) ([]byte, error)) gin.HandlerFunc {
	return func(c *gin.Context) {
		body, ok := a.body(c)
		if !ok {
			return
		}
		defer a.done(c, body)
		parsed, ok := jsonbody.Parse(body)
		if !ok {
			a.fail(c, http.StatusBadRequest, "", jsonbody.Refusal(body))
			return
		}
		if !a.undirected(c, parsed) {
			return
		}
		name := parsed.Get("model").String()
		m, known, _ := a.models.Find(c.Request.Context(), router.Need{Model: name, Now: true}) // it does not wait
		if !known {
			a.noModel(c, name)
			return
		}
		answer, err := serve(m.Tokens, c.Request.Context(), parsed.Raw)
		var bad *tokens.BadRequest
		var refused *tokens.AskError
		switch {
		case errors.As(err, &bad):
			a.fail(c, http.StatusBadRequest, "", bad.Error())
		case errors.As(err, &refused):
			c.Data(refused.Status, "application/json", refused.Answer)
		case err != nil:
			a.fail(c, http.StatusServiceUnavailable, "", err.Error())
		default:
			c.Data(http.StatusOK, "application/json", answer)
		}
	}
}

// listModels lists the models of the workers; while none is up, the configured name.
func (a *API) listModels(c *gin.Context) {
	list := a.proxy.Models(c.Request.Context(), a.workers(), a.question(c, nil).Header)
	if len(list) == 0 && a.settings.ServedModelName != "" {
		list = append(list, proxy.ModelCard(a.settings.ServedModelName))
	}
	if name := strings.TrimPrefix(c.Param("model"), "/"); name != "" {
		for _, m := range list {
			if gjson.GetBytes(m, "id").String() == name {
				c.Data(http.StatusOK, "application/json", m)
				return
			}
		}
		a.noModel(c, name)
		return
	}
	c.JSON(http.StatusOK, gin.H{"object": "list", "data": list})
}
