package demo

import (
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/term"
)

// style is the number of an SGR sequence.
type style string

const (
	plain  style = ""
	bold   style = "1"
	red    style = "31"
	green  style = "32"
	yellow style = "33"
)

const (
	clearLine    = "\r\x1b[K"
	usualWidth   = 80
	everySoOften = time.Second // status lines where nothing can be redrawn
)

// screen is where the story is told: lines, and one status line below them that is redrawn in place on a terminal.
// Elsewhere the status line is printed now and then, and no escape sequence ever.
type screen struct {
	w       io.Writer
	redraw  bool
	colour  bool
	columns func() int // of the terminal; 0: not known
	now     func() time.Time

	line    string    // the status line
	said    string    // where nothing is redrawn: the one that was printed last
	printed time.Time // when
	err     error     // the first one
}

// newScreen looks at what w is, and at what the environment asks for.
func newScreen(w io.Writer, env func(string) string, noRedraw bool) *screen {
	s := &screen{w: w, columns: func() int { return 0 }, now: time.Now}
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return s
	}
	s.columns = func() int {
		w, _, err := term.GetSize(int(f.Fd()))
		if err != nil {
			return 0
		}
		return w
	}
	smart := env("TERM") != "" && env("TERM") != "dumb"
	s.redraw = smart && !noRedraw
	s.colour = smart && env("NO_COLOR") == ""
	return s
}

// width is what a line may take. The last column stays free: some terminals wrap as soon as it is written.
func (s *screen) width() int {
	n := s.columns()
	if n <= 0 {
		n = usualWidth
	}
	return min(n, usualWidth) - 1
}

func (s *screen) write(text string) {
	if _, err := io.WriteString(s.w, text); err != nil && s.err == nil {
		s.err = err
	}
}

func (s *screen) styled(st style, text string) string {
	if !s.colour || st == plain {
		return text
	}
	return "\x1b[" + string(st) + "m" + text + "\x1b[0m"
}

// raw prints one line above the status line, as it is.
func (s *screen) raw(text string) {
	if !s.redraw || s.line == "" {
		s.write(text + "\n")
		return
	}
	s.write(clearLine + text + "\n" + s.line)
}

// hang prints text, wrapped at words, behind a lead and below it.
func (s *screen) hang(st style, lead, text string) {
	for _, line := range wrap(text, s.width()-len(lead)) {
		s.raw(s.styled(st, lead+line))
		lead = strings.Repeat(" ", len(lead))
	}
}

// heading begins a part of the story.
func (s *screen) heading(number, text string) {
	s.raw("")
	lead := ""
	if number != "" {
		lead = number + "  "
	}
	s.hang(bold, lead, text)
}

// point prints what happens.
func (s *screen) point(text string) {
	lead := s.styled(yellow, "   -") + " "
	for _, line := range wrap(text, s.width()-len("   - ")) {
		s.raw(lead + line)
		lead = "     "
	}
}

// status replaces the status line.
func (s *screen) status(text string) {
	if w := s.width(); len(text) > w {
		text = text[:w]
	}
	if text == s.line {
		return
	}
	s.line = text
	if s.redraw {
		s.write(clearLine + text)
	} else if s.now().Sub(s.printed) >= everySoOften {
		s.flush()
	}
}

// settle leaves the status line where it is; the next one begins below.
func (s *screen) settle() {
	switch {
	case s.line == "":
	case s.redraw:
		s.write("\n")
	default:
		s.flush()
	}
	s.line, s.said, s.printed = "", "", time.Time{}
}

// flush prints the status line where nothing can be redrawn, unless it stands there already.
func (s *screen) flush() {
	if s.line != s.said {
		s.write(s.line + "\n")
	}
	s.said, s.printed = s.line, s.now()
}

// wrap breaks text at spaces into lines of at most width bytes; a longer word stays whole.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
