package radix_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/cache/radix"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// TestApplyAloneChangesAnIndex: what embeds a Reader and declares Apply passes no change by. A new
// method of Reader is added here once it is clear that it changes nothing.
func TestApplyAloneChangesAnIndex(t *testing.T) {
	methods := func(of reflect.Type) (names []string) {
		for i := range of.NumMethod() {
			names = append(names, of.Method(i).Name)
		}
		return names
	}
	readers := []string{"AllBlocks", "Blocks", "CanMatch", "Depth", "DumpLowerOf", "DumpOf", "HeldOf", "LayoutOf", "Lookaheads", "LowerOf", "Match", "Workers"}
	testkit.WantEqual(t, "methods of Reader", methods(reflect.TypeFor[radix.Reader]()), readers)
	testkit.WantEqual(t, "methods of Index", methods(reflect.TypeFor[radix.Index]()), slices.Sorted(slices.Values(append(readers, "Apply"))))
}

// TestIndexesTakeEachKindOfChange, by whatever they learn besides.
func TestIndexesTakeEachKindOfChange(t *testing.T) {
	now := func() time.Time { return time.Unix(1, 0) }
	approx := func() *radix.Approx { return radix.NewApprox(time.Minute, 100, 0.8, now) }
	mixed, _ := radix.NewMixed(radix.NewTree(), approx(), approx())
	for name, index := range map[string]radix.Index{
		"approx": approx(), "trees": radix.NewTrees(100, time.Minute, now), "mixed": mixed, "blind": radix.NewBlind(), "booked": radix.NewTreeWithBook(summary.NewBook()),
	} {
		t.Run(name, func(t *testing.T) { radixtest.PassesEachKind(t, index) })
	}
}

// TestDecoratorsPassNoChangeBy: no struct embeds an Index, whose changes would bypass it, and each
// switch over the kinds of changes names all of them.
func TestDecoratorsPassNoChangeBy(t *testing.T) {
	kinds := changeKinds(t)
	if want := int(radix.KindsEnd) - 1; len(kinds) != want {
		t.Fatalf("%d kinds of changes are found, %d are declared: %v", len(kinds), want, kinds)
	}
	switches := 0
	err := filepath.WalkDir("../../..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".go" {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		found, faults := bypasses(file, kinds)
		switches += found
		for _, fault := range faults {
			t.Errorf("%s: %s", path, fault)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if switches < 5 {
		t.Errorf("%d switches over kinds of changes are found", switches)
	}

	for _, bad := range []string{"type d struct{ radix.Index }", "func (d *d) f(c *radix.Change) { switch c.Kind { case radix.Stored, radix.Held: } }"} {
		file, err := parser.ParseFile(token.NewFileSet(), "d.go", "package d\n"+bad, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		if _, faults := bypasses(file, kinds); len(faults) != 1 {
			t.Errorf("%s: faults %q, want one", bad, faults)
		}
	}
}

// changeKinds returns the names of all kinds of changes.
func changeKinds(t *testing.T) (kinds []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "change.go", nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if value, is := n.(*ast.ValueSpec); is && value.Names[0].Name != "KindsEnd" {
			kinds = append(kinds, value.Names[0].Name)
		}
		return true
	})
	return kinds
}

// bypasses returns what of a file could pass changes by, and the number of its switches over kinds
// of changes.
func bypasses(file *ast.File, kinds []string) (switches int, faults []string) {
	// name returns the name of an expression that package radix declares; else it is empty.
	name := func(e ast.Expr) string {
		if selector, is := e.(*ast.SelectorExpr); is {
			if of, is := selector.X.(*ast.Ident); is && of.Name == "radix" {
				return selector.Sel.Name
			}
		}
		if ident, is := e.(*ast.Ident); is && file.Name.Name == "radix" {
			return ident.Name
		}
		return ""
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.StructType:
			for _, field := range n.Fields.List {
				if len(field.Names) == 0 && name(field.Type) == "Index" {
					faults = append(faults, "a struct embeds radix.Index: embed radix.Reader and declare Apply")
				}
			}
		case *ast.SwitchStmt:
			if tag, is := n.Tag.(*ast.SelectorExpr); !is || tag.Sel.Name != "Kind" {
				break
			}
			var named []string
			for _, clause := range n.Body.List {
				for _, e := range clause.(*ast.CaseClause).List {
					if kind := name(e); slices.Contains(kinds, kind) {
						named = append(named, kind)
					}
				}
			}
			if len(named) == 0 {
				break
			}
			switches++
			missing := slices.DeleteFunc(slices.Clone(kinds), func(kind string) bool { return slices.Contains(named, kind) })
			if len(missing) > 0 {
				faults = append(faults, fmt.Sprintf("a switch over the kinds of changes does not name %s", strings.Join(missing, ", ")))
			}
		}
		return true
	})
	return switches, faults
}
