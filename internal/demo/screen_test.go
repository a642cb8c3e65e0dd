package demo

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
)

func terminal(out *bytes.Buffer, columns int) *screen {
	return &screen{w: out, now: time.Now, redraw: true, colour: true, columns: func() int { return columns }}
}

// rows is what a terminal shows that obeys CR and erase-line and wraps what is too long.
func rows(t *testing.T, out string, columns int) []string {
	t.Helper()
	lines := []string{""}
	for len(out) > 0 {
		last := &lines[len(lines)-1]
		switch {
		case strings.HasPrefix(out, clearLine):
			*last, out = "", out[len(clearLine):]
			continue
		case strings.HasPrefix(out, "\x1b["):
			end := strings.IndexByte(out, 'm')
			if end < 0 || strings.Trim(out[2:end], "0123456789") != "" {
				t.Fatalf("a sequence that is no colour: %q", out[:min(len(out), 10)])
			}
			out = out[end+1:]
			continue
		case out[0] == '\n':
			lines = append(lines, "")
		case out[0] < ' ' || out[0] > '~':
			t.Fatalf("not plain ASCII: %q", out[:min(len(out), 10)])
		case len(*last) == columns:
			lines = append(lines, out[:1])
		default:
			*last += out[:1]
		}
		out = out[1:]
	}
	return lines
}

func TestStatusLineIsRedrawnBelowWhatIsSaid(t *testing.T) {
	var out bytes.Buffer
	s := terminal(&out, 40)
	s.status("one")
	s.status(strings.Repeat("two ", 30))
	s.point("something happens that takes more than one line to say")
	s.status("three")
	s.settle()
	s.settle()
	s.raw("end")
	want := []string{"   - something happens that takes more", "     than one line to say", "three", "end", ""}
	if got := rows(t, out.String(), 40); !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

func TestWithoutATerminalStatusLinesAreFewAndWhole(t *testing.T) {
	var out bytes.Buffer
	s := newScreen(&out, func(string) string { return "xterm" }, false)
	now := time.Unix(0, 0)
	s.now = func() time.Time { return now }
	s.status("first")
	for range 11 {
		s.status("second")
		s.status("third")
		now = now.Add(everySoOften / 10)
	}
	s.raw("said")
	s.settle()
	s.settle()
	s.status("again") // a new part begins with a line
	s.settle()
	if want := "first\nsecond\nsaid\nthird\nagain\n"; out.String() != want {
		t.Errorf("%q", &out)
	}
}

func TestFiguresFitTheTerminal(t *testing.T) {
	for _, columns := range []int{0, 20, 40, 59, 60, 61, 80, 200} {
		var out bytes.Buffer
		s := terminal(&out, columns)
		st := &stage{screen: s}
		width := columns
		if width == 0 {
			width = usualWidth
		}
		for _, draining := range []bool{false, true} {
			st.draining = draining
			for _, n := range []now{{}, {committed: 3, pending: 3}, {committed: 9_999_999, pending: 1, shipped: 9_999_998, folded: 9_999_999}, {committed: 100, shipped: 100}} {
				st.header()
				st.show(n)
				if len(s.line) >= width {
					t.Errorf("%d columns: %q wraps", columns, s.line)
				}
				if draining && columns >= 60 && (!strings.Contains(s.line, "[") || !strings.Contains(s.line, "%")) {
					t.Errorf("%d columns: no progress bar in %q", columns, s.line)
				}
			}
		}
		s.settle()
		got := rows(t, out.String(), width)
		if columns < 60 {
			continue
		}
		for _, line := range got[:len(got)-1] {
			if len(line) != len(got[0]) {
				t.Errorf("%d columns: %q is not in line with %q", columns, line, got[0])
			}
		}
	}
}

func TestWhatIsNotWrappedFitsSixtyColumns(t *testing.T) {
	var out bytes.Buffer
	s := terminal(&out, 60)
	(&Figures{Committed: 999_999, Deliveries: 999_999}).table(s)
	next(s, "go run .")
	for _, line := range rows(t, out.String(), 1000) {
		if len(line) > 59 {
			t.Errorf("%d columns: %q", len(line), line)
		}
	}
}

func TestBar(t *testing.T) {
	l := layout{20}
	for want, n := range map[string][2]int64{
		"   [..........]   0%": {0, 1000}, "   [#.........]  10%": {100, 1000}, "   [#########.]  99%": {999, 1000}, "   [##########] 100%": {7, 7},
	} {
		if got := l.bar(n[0], n[1]); got != want {
			t.Errorf("%d of %d: %q", n[0], n[1], got)
		}
	}
	if got := l.bar(0, 0); got != "   [..........]   0%" {
		t.Errorf("nothing yet: %q", got)
	}
	if got := (layout{9}).bar(1, 2); got != "      50%" {
		t.Errorf("no room: %q", got)
	}
}

func TestComma(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -1000: "-1,000", -999: "-999"} {
		if got := comma(n); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}

func TestWrap(t *testing.T) {
	for _, c := range []struct {
		text  string
		width int
		want  []string
	}{
		{"", 10, []string{""}}, {"a b", 3, []string{"a b"}}, {"a bc", 3, []string{"a", "bc"}}, {"longword a", 3, []string{"longword", "a"}}, {"a b", -1, []string{"a", "b"}},
	} {
		if got := wrap(c.text, c.width); !slices.Equal(got, c.want) {
			t.Errorf("%q in %d: %q", c.text, c.width, got)
		}
	}
}
