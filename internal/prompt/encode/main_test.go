package encode

import (
	"testing"

	"kvrouter/internal/testkit/nativetest"
)

func TestMain(m *testing.M) { nativetest.Main(m) }
