package main

import (
	"fmt"

	"golang.org/x/sync/errgroup"
)

// send sends that many different chats, a few at a time, and returns how many
// went to each worker, by id.
func (s *mockSite) send(from, requests, atATime int) []int {
	s.t.Helper()
	workers := make([]uint64, requests)
	var group errgroup.Group
	group.SetLimit(atATime)
	for i := range requests {
		group.Go(func() error {
			a, err := s.chat(s.t.Context(), say(fmt.Sprint(from+i, " is a number that no other chat has")), true, 8)
			if err == nil && !a.finished {
				err = fmt.Errorf("answer %+v", a)
			}
			workers[i] = a.worker
			return err
		})
	}
	if err := group.Wait(); err != nil {
		s.t.Fatal(err)
	}
	counts := make([]int, s.app.config.NumWorkers)
	for _, w := range workers {
		counts[w]++
	}
	return counts
}
