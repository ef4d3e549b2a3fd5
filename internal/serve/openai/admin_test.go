package openai

import (
	"fmt"
	"net/http"
	"testing"
)

func TestCallsOfTwoKeysAreApart(t *testing.T) {
	var s controls
	a, first := s.begin(controlID{1, "step-1"}, "POST /pause")
	if !first {
		t.Error("the first call is known")
	}
	s.end(a, adminAnswer{http.StatusOK, []byte("of a")})
	if again, first := s.begin(controlID{1, "step-1"}, "POST /pause"); first || again != a {
		t.Error("a call that was sent again is new")
	}
	if b, first := s.begin(controlID{2, "step-1"}, "POST /pause"); !first || b == a {
		t.Error("a key got the answer to another one's call")
	}
}

func TestNamedCallsAreBounded(t *testing.T) {
	var s controls
	open, _ := s.begin(controlID{1, "open"}, "POST /pause")
	for i := range 4 * keptCalls {
		call, _ := s.begin(controlID{1, fmt.Sprint(i)}, "POST /pause")
		s.end(call, adminAnswer{http.StatusOK, make([]byte, i%3*keptAnswers/8)})
	}
	if len(s.calls) != s.order.Len() || len(s.calls) > keptCalls || s.bytes > keptAnswers {
		t.Errorf("%d calls, %d in order, %d bytes", len(s.calls), s.order.Len(), s.bytes)
	}
	if again, first := s.begin(controlID{1, "open"}, "POST /pause"); first || again != open {
		t.Error("a call that is under way was forgotten")
	}
	refused, _ := s.begin(controlID{1, "refused"}, "POST /pause")
	s.end(refused, adminFault(http.StatusConflict, "another one is under way"))
	if _, first := s.begin(controlID{1, "refused"}, "POST /pause"); !first {
		t.Error("a call that no worker has got is not done again")
	}
}
