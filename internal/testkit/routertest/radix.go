package routertest

import (
	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
	"kvrouter/internal/testkit"
)

func dumped(r radix.Index) []testkit.DumpEntry {
	var all []testkit.DumpEntry
	r.Dump(func(w kv.WorkerKey, parent uint64, hasParent bool, block kv.StoredBlock) bool {
		all = append(all, testkit.DumpEntry{Worker: w, Parent: parent, HasParent: hasParent, Block: block})
		return true
	})
	return all
}
