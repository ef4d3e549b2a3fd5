package router

import "kvrouter/internal/policy"

// WithThompson runs f with the router's policy, under its lock, if that is
// thompson; else it returns false.
func (r *Router) WithThompson(f func(*policy.Thompson)) bool {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	p, is := r.Policy.(*policy.Thompson)
	if is {
		f(p)
	}
	return is
}
