package replica

import (
	"testing"

	"kvrouter/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }
