package openai

import (
	"bufio"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/serve/proxy"
)

// engineRoute is a route of an engine's server.
type engineRoute struct{ method, path string }

// routesOf reads a list that testdata/routes/list.py has written.
func routesOf(t *testing.T, file string) (routes []engineRoute) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if method, path, ok := strings.Cut(lines.Text(), " "); ok && method != "#" {
			routes = append(routes, engineRoute{strings.Replace(method, "WEBSOCKET", "GET", 1), path})
		}
	}
	if len(routes) < 70 {
		t.Fatalf("%s has %d routes", file, len(routes))
	}
	return routes
}

// leftOut reads the routes that docs/engine-routes.md says are left out. Those without a method are it with
// all.
func leftOut(t *testing.T, page string) map[engineRoute]bool {
	t.Helper()
	_, section, _ := strings.Cut(page, "\n## Routes left out\n")
	section, _, _ = strings.Cut(section, "\n#")
	routes := map[engineRoute]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| ([A-Z]*) ?(`/[^|]*) \\| [^|]+ \\|$").FindAllStringSubmatch(section, -1) {
		for _, path := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[2], -1) {
			routes[engineRoute{row[1], path[1]}] = true
		}
	}
	if len(routes) == 0 {
		t.Fatal("docs/engine-routes.md has no routes that are left out")
	}
	return routes
}

// TestEveryRouteOfTheEngines holds that each route of vLLM and SGLang is served, or administration,
// or named as left out.
func TestEveryRouteOfTheEngines(t *testing.T) {
	page := ""
	for _, name := range []string{"http.md", "engine-routes.md"} {
		text, err := os.ReadFile("../../../docs/" + name)
		if err != nil {
			t.Fatal(err)
		}
		page += string(text)
	}
	out := leftOut(t, page)
	param := regexp.MustCompile(`[:*][a-z]+|\{[a-z_:]+\}`)
	served := map[engineRoute]bool{}
	for _, r := range newTestAPI(t, setup{}).api.engine.Routes() {
		served[engineRoute{strings.Replace(r.Method, "HEAD", "GET", 1), param.ReplaceAllString(r.Path, "*")}] = true
	}
	lists, err := filepath.Glob("../../../testdata/routes/*.txt")
	if err != nil || len(lists) != 2 {
		t.Fatal(lists, err)
	}
	left := map[engineRoute]bool{}
	for _, list := range lists {
		for _, r := range routesOf(t, list) {
			whole := engineRoute{"", r.path}
			isOut := out[r] || out[whole]
			left[r], left[whole] = true, true
			is := served[engineRoute{strings.Replace(r.method, "HEAD", "GET", 1), param.ReplaceAllString(r.path, "*")}]
			switch {
			case is && isOut:
				t.Errorf("%s: %s %s is served, and docs/engine-routes.md says that it is left out", list, r.method, r.path)
			case !is && !isOut:
				t.Errorf("%s: %s %s is not served: serve it, add it to proxy.AdminRoutes, or give the reason in docs/engine-routes.md", list, r.method, r.path)
			case !strings.Contains(r.path, "{") && !strings.Contains(page, "`"+r.path+"`") && !strings.Contains(page, "`"+r.path+"?"):
				t.Errorf("%s: no page names %s", list, r.path)
			}
		}
	}
	for r := range out {
		if !left[r] {
			t.Errorf("docs/engine-routes.md says that %s %s is left out, which no engine has", r.method, r.path)
		}
	}
	_, admin, _ := strings.Cut(page, "\n## Admin paths\n")
	admin, _, _ = strings.Cut(admin, "\n#")
	var named []string
	for _, path := range regexp.MustCompile("`(/[^`]+)`").FindAllStringSubmatch(admin, -1) {
		named = append(named, path[1])
	}
	slices.Sort(named)
	if want := slices.Sorted(slices.Values(append([]string{flushRoute, "/server_info"}, proxy.AdminRoutes...))); !slices.Equal(named, want) {
		t.Errorf("docs/engine-routes.md names the admin paths\n%q, not\n%q", named, want)
	}
}
