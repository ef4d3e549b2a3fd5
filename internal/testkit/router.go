package testkit

// testBlock is the block size of the router tests, in tokens.
const TestBlock = 4

// count returns tokens from, from+1, ...
func Count(from uint32, n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = from + uint32(i)
	}
	return tokens
}
