package browser

import (
	"bytes"
	"cmp"
	"image"
	"image/color"
	"image/png"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"kvrouter/test"
)

// pictureWidths are those of a telephone and of a large screen, pixels.
var pictureWidths = []int64{360, 1600}

// docsPictures are those that docs/ shows, of docsWidths: KVROUTER_PAGE_PICTURES=docs
// writes them alone.
var (
	docsWidths   = []int64{360, 1280}
	docsPictures = map[string]string{
		"fleet-1280-light.png": "page-fleet.png", "receipt-1280-light.png": "page-receipt.png",
		"cache-1280-dark.png": "page-cache.png", "receipt-360-light.png": "page-narrow.png",
	}
)

// TestBrowserPictures takes one of each view of a busy site, for people to look at.
func TestBrowserPictures(t *testing.T) {
	dir := os.Getenv(envPictures)
	if dir == "" {
		t.Skip(envPictures + " names no folder")
	}
	const workers, resting = 6, 4
	b := startBrowser(t)
	s := test.StartMocks(t, workers, "--speedup-ratio=1", "--mock=num-gpu-blocks=2048")
	b.watched(s.Router, workers)
	stop := keepBusy(t, s.Router, 12)
	defer stop()
	s.Act(resting, "drain")
	b.until(90*time.Second, "some trends", "document.querySelectorAll('.spark path:not(.area)').length > 4 && performance.now() > 60000")
	widths := pictureWidths
	if filepath.Base(dir) == "docs" {
		widths = docsWidths
	}
	b.eachLook(widths, func(look string) {
		for _, view := range []struct{ name, hash, ready string }{
			{"fleet", "#/fleet", "document.querySelector('.card')"},
			{"requests", "#/requests", "document.querySelector('tbody tr')"},
			{"receipt", "", "document.querySelector('aside .candidate')"},
			{"tenants", "#/tenants", "document.querySelector('[data-tenant]')"},
			{"cache", "#/cache", "document.querySelector('[data-node]')"},
			{"trends", "#/trends", "document.querySelectorAll('.chart canvas').length === 7"},
			{"try", "#/try", "document.querySelector('.beside')"},
			{"confirm", "#/fleet", "document.querySelector('dialog[open]') || document.querySelector('.card button').click()"},
		} {
			if view.hash == "" {
				b.click("tbody tr:nth-child(12) a")
			} else {
				eval[bool](b, "(location.hash = '"+view.hash+"', true)")
			}
			if view.name == "try" && look == "360-light" {
				b.fill("#try-text", "Write a short story about a river and a lantern.")
				b.click("#try-send")
				b.until(10*time.Second, "an answer", "document.querySelector('.timing') && document.querySelector('.beside .candidate')")
			}
			b.until(10*time.Second, view.name, view.ready)
			if view.name == "trends" {
				eval[bool](b, "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
			}
			b.fits()
			b.picture(filepath.Join(dir, view.name+"-"+look+".png"))
			if view.name == "confirm" {
				b.click("dialog button")
			}
		}
	})
}

// picture writes what the window shows; into docs/ only what is shown there.
func (b *browser) picture(path string) {
	b.t.Helper()
	if filepath.Base(filepath.Dir(path)) == "docs" {
		name, shown := docsPictures[filepath.Base(path)]
		if !shown {
			return
		}
		path = filepath.Join(filepath.Dir(path), name)
	}
	content, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		b.t.Fatal(err)
	}
	if content, err = fewColours(content); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// fewColours writes a picture with the 256 colours that it has most of, which makes it
// three times smaller.
func fewColours(content []byte) ([]byte, error) {
	full, err := png.Decode(bytes.NewReader(content))
	if err != nil {
		return nil, err
	}
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(full.At(x, y)).(color.RGBA) }
	bounds, counts := full.Bounds(), map[color.RGBA]int{}
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			counts[at(x, y)]++
		}
	}
	most := slices.SortedFunc(maps.Keys(counts), func(a, b color.RGBA) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a.R, b.R), cmp.Compare(a.G, b.G), cmp.Compare(a.B, b.B))
	})
	palette := color.Palette{}
	for _, c := range most[:min(len(most), 256)] {
		palette = append(palette, c)
	}
	few, places := image.NewPaletted(bounds, palette), map[color.RGBA]uint8{}
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			c := at(x, y)
			place, known := places[c]
			if !known {
				place = uint8(palette.Index(c))
				places[c] = place
			}
			few.SetColorIndex(x, y, place)
		}
	}
	var out bytes.Buffer
	err = (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, few)
	return out.Bytes(), err
}

// TestFewColours holds what a picture becomes: the same where it has few colours, and
// its most frequent ones where it has more.
func TestFewColours(t *testing.T) {
	for _, height := range []int{6, 40} { // lines of 40 colours, of which the last fills most of the picture
		picture := image.NewRGBA(image.Rect(0, 0, 40, height+200))
		for x := range 40 {
			for y := range height + 200 {
				picture.Set(x, y, color.RGBA{uint8(6 * x), uint8(6 * min(y, height-1)), 0, 255})
			}
		}
		var in bytes.Buffer
		if err := png.Encode(&in, picture); err != nil {
			t.Fatal(err)
		}
		out, err := fewColours(in.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		got, err := png.Decode(bytes.NewReader(out))
		if err != nil {
			t.Fatal(err)
		}
		if n := len(got.ColorModel().(color.Palette)); n != min(256, 40*height) {
			t.Errorf("%d lines: %d colours", height, n)
		}
		for x := range 40 {
			for y := height; y < height+200; y++ {
				if got.At(x, y).(color.RGBA) != picture.RGBAAt(x, y) {
					t.Fatalf("%d lines: %d, %d is %v", height, x, y, got.At(x, y))
				}
			}
		}
	}
}
