// Package page is what people look at: a live page of the fleet, the last requests
// with why they went where they did, what the caches hold and the trends of the last
// hour. Nothing is computed for it while nobody looks.
package page
