package radix

// rootNode is the node of the empty prefix. No table ever holds it, so that 0
// can also mean "no node".
const rootNode = uint32(0)

// nodesPerChunk is the slab's unit of growth, a power of two: 4,096 nodes are
// 96 KiB.
const nodesPerChunk = 4096

// treeNode is one prefix in the index: 24 bytes, no pointers.
type treeNode struct {
	local   uint64 // local hash of the prefix's last block
	parent  uint32
	members uint32 // worker set that holds that block
	// child is one of the children, kept here so that a chain is walked without
	// hashing; the others are in Tree.branches. It may be 0 while there are
	// others. In a free node it is the next free one.
	child    uint32
	children uint32
}

// nodeSlab holds all nodes by number, in chunks that never move: growing copies
// nothing, and nodes made one after the other lie side by side.
type nodeSlab struct {
	chunks []*[nodesPerChunk]treeNode
	next   uint32 // lowest number never used
	free   uint32 // first node of the free list, or 0
	used   int    // nodes in use, the root among them
}

// at returns node n, which must exist.
func (s *nodeSlab) at(n uint32) *treeNode {
	return &s.chunks[n/nodesPerChunk][n%nodesPerChunk]
}

// run counts the nodes from n+1 on, each the child of the one before, that stand
// for these local hashes and have the same members as n. Blocks stored together
// lie in such runs; walking one by its numbers instead of its children lets the
// processor fetch nodes far ahead.
func (s *nodeSlab) run(n, members uint32, local []uint64) int {
	nodes := s.chunks[n/nodesPerChunk][n%nodesPerChunk:]
	length := min(len(local), len(nodes)-1)
	for i := range length {
		next := &nodes[i+1]
		if nodes[i].child != n+uint32(i)+1 || next.local != local[i] || next.members != members {
			return i
		}
	}
	return length
}

// runApart is run, not inlined: among the variables of a long function, the loop has too few
// registers.
//
//go:noinline
func (s *nodeSlab) runApart(n, members uint32, local []uint64) int {
	return s.run(n, members, local)
}

// alloc returns the number of a node whose contents the caller must set. It
// takes the node freed last: chains are removed from their end, so that the next
// chain gets theirs in ascending order.
func (s *nodeSlab) alloc() uint32 {
	s.used++
	if n := s.free; n != 0 {
		s.free = s.at(n).child
		return n
	}
	n := s.next
	if int(n/nodesPerChunk) == len(s.chunks) {
		s.chunks = append(s.chunks, new([nodesPerChunk]treeNode))
	}
	s.next++
	return n
}

// release puts node n on the free list.
func (s *nodeSlab) release(n uint32) {
	*s.at(n) = treeNode{child: s.free}
	s.free = n
	s.used--
}
