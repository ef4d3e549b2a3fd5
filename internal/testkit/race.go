//go:build race

package testkit

// RaceDetector tells that tests run ten times as slow.
const RaceDetector = true
