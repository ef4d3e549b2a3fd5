package web

import (
	"cmp"
	"math"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/quota"
)

// Places returns a pool of so many requests in flight; 0: no limit.
func Places(most int) *quota.Pool { return quota.New(int64(cmp.Or(most, math.MaxInt32))) }

// Within serves a request while its client has one of the places, which are requests in
// flight. Where there is none for it, refuse answers.
func Within(places *quota.Pool, client func(*gin.Context) string, refuse gin.HandlerFunc) gin.HandlerFunc {
	return func(c *gin.Context) {
		name := client(c)
		if !places.Take(name, 0, 1) {
			c.Header("Retry-After", "1")
			refuse(c)
			c.Abort()
			return
		}
		defer places.Give(name, 1)
		c.Next()
	}
}

// Address names the client of a request by its address.
func Address(c *gin.Context) string { return AddressOf(c.Request) }
