package test

import (
	"fmt"
	"testing"
)

// TestMockPredictionsAreExactOverAttachedWorkers holds that the router predicts for
// workers that it has not started what their caches hold.
func TestMockPredictionsAreExactOverAttachedWorkers(t *testing.T) {
	s := StartMocks(t, 2)
	text := ""
	for i := range 6 {
		text += fmt.Sprintf("sentence %d of a text that grows with each chat, so that it comes to several blocks. ", i)
		a, err := s.Chat(t.Context(), Say(text), i%2 == 0, 8)
		if err != nil {
			t.Fatal(err)
		}
		if a.Predicted != a.Cached || i > 2 && a.Cached == 0 {
			t.Errorf("chat %d: %+v", i, a)
		}
		s.Settle()
	}
	if s.InFlight() != 0 {
		t.Error("a request is still counted as in flight")
	}
}
