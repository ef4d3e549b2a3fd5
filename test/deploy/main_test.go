package deploy

import (
	"testing"

	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }
