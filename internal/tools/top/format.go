package top

import (
	"fmt"
	"strconv"
	"strings"
)

// none stands for an unknown value.
const none = "–"

// called is a worker's name in that many characters, at least 12, else its
// id. The distinct part of Pod names stands at the end of their names: long ones are cut in the
// middle.
func called(id uint64, name string, most int) string {
	if name == "" {
		return strconv.FormatUint(id, 10)
	}
	most = max(most, 12)
	text := []rune(name)
	if len(text) <= most {
		return name
	}
	end := min(12, most/2)
	return string(text[:most-1-end]) + "…" + string(text[len(text)-end:])
}

// count writes a number in at most seven characters: 12, 9,999, 12.3k, 4.56M.
func count(n float64) string {
	sign := ""
	if n < 0 {
		sign, n = "-", -n
	}
	switch {
	case n < 1000:
		return fmt.Sprintf("%s%.0f", sign, n)
	case n < 10_000:
		return fmt.Sprintf("%s%d,%03d", sign, int(n)/1000, int(n)%1000)
	}
	for _, unit := range []string{"k", "M", "G", "T"} {
		if n /= 1000; n < 999.5 {
			return sign + strconv.FormatFloat(n, 'f', decimals(n), 64) + unit
		}
	}
	return sign + "many"
}

// decimals are those that leave three figures.
func decimals(n float64) int {
	switch {
	case n < 9.995:
		return 2
	case n < 99.95:
		return 1
	}
	return 0
}

// seconds writes a duration in two units at most: 350us, 12ms, 1.25s, 3m07s, 2h15m,
// 4d03h.
func seconds(s float64) string {
	switch {
	case s < 0:
		return "-" + seconds(-s)
	case s == 0:
		return "0s"
	case s < .001:
		return fmt.Sprintf("%.0fµs", s*1e6)
	case s < .9995:
		return fmt.Sprintf("%.0fms", s*1e3)
	case s < 60:
		return strconv.FormatFloat(s, 'f', min(2, decimals(s)), 64) + "s"
	case s < 3600:
		return fmt.Sprintf("%dm%02ds", int(s)/60, int(s)%60)
	case s < 86400:
		return fmt.Sprintf("%dh%02dm", int(s)/3600, int(s)/60%60)
	case s < 1000*86400:
		return fmt.Sprintf("%dd%02dh", int(s)/86400, int(s)/3600%24)
	}
	return "years"
}

func maybeSeconds(s *float64) string {
	if s == nil {
		return none
	}
	return seconds(*s)
}

func percent(share *float64) string {
	if share == nil {
		return none
	}
	return fmt.Sprintf("%.0f%%", 100*max(0, min(*share, 1)))
}

// bar draws a share as that many cells, with the percentage behind.
func bar(share *float64, cells int) string {
	if share == nil {
		return strings.Repeat(" ", cells) + fmt.Sprintf("%5s", none)
	}
	full := int(max(0, min(*share, 1))*float64(cells) + .5)
	return strings.Repeat("█", full) + strings.Repeat("░", cells-full) + fmt.Sprintf("%5s", percent(share))
}
