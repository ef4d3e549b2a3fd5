//go:build !race

package testkit

// RaceDetector reports whether the race detector is on, which makes tests ten times slower.
const RaceDetector = false
