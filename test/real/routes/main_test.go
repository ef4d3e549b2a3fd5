// Package routes compares the answers of real engines on the routes that have no exact prompt
// with and without the router: `make test-routes`; and the lists of routes in testdata/ with those of
// the installed engines.
package routes

import (
	"testing"

	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }
