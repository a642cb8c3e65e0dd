package demo

import (
	"fmt"
	"strings"
)

// layout is how wide the place before the four columns of figures is.
type layout struct{ label int }

const figure = 10 // columns of a figure

func layoutOf(width int) layout { return layout{min(max(width-4*figure, 0), 32)} }

func (l layout) row(label string, figures ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-*.*s", l.label, l.label, label)
	for _, f := range figures {
		fmt.Fprintf(&b, "%*s", figure, f)
	}
	return b.String()
}

// bar is how much of all is done, as "   [###.....]  37%". Only all of all is 100%.
func (l layout) bar(done, all int64) string {
	if all <= 0 {
		done, all = 0, 1
	}
	percent := fmt.Sprintf("%4d%%", done*100/all)
	room := l.label - len("   [] ") - len(percent) + 1
	if room < 5 {
		return fmt.Sprintf("%*s", l.label, percent)
	}
	full := int(done * int64(room) / all)
	return "   [" + strings.Repeat("#", full) + strings.Repeat(".", room-full) + "]" + percent
}

// comma writes 1234567 as 1,234,567.
func comma(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
