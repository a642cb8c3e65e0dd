package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
	"unicode/utf8"
)

// clean makes text from anywhere fit for one line of a terminal: what does not print (control characters with their
// escape sequences, marks that turn the direction of writing, broken UTF-8) is shown as an escape.
func clean(s string) string {
	if strings.IndexFunc(s, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }) < 0 {
		return s
	}
	b := make([]byte, 0, len(s)+16)
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n == 1:
			b = fmt.Appendf(b, `\x%02x`, s[0])
		case unicode.IsPrint(r):
			b = append(b, s[:n]...)
		default:
			q := strconv.AppendQuoteRune(nil, r)
			b = append(b, q[1:len(q)-1]...)
		}
		s = s[n:]
	}
	return string(b)
}

// cut shortens what a table has no room for.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// table prints rows in columns.
func (a *App) table(head []string, rows [][]string) error {
	w := tabwriter.NewWriter(a.Stdout, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{head}, rows...) {
		cells := make([]string, len(row))
		for i, cell := range row {
			if cells[i] = clean(cell); cell == "" {
				cells[i] = "-"
			}
		}
		if _, err := fmt.Fprintln(w, strings.Join(cells, "\t")); err != nil {
			return err
		}
	}
	return w.Flush()
}

// fields prints one thing as lines of name and value.
func (a *App) fields(pairs ...string) error {
	w := tabwriter.NewWriter(a.Stdout, 0, 0, 2, ' ', 0)
	for i := 0; i < len(pairs); i += 2 {
		if _, err := fmt.Fprintf(w, "%s\t%s\n", pairs[i], clean(pairs[i+1])); err != nil {
			return err
		}
	}
	return w.Flush()
}

func (a *App) blank() error {
	_, err := a.Stdout.Write([]byte("\n"))
	return err
}

// raw is JSON that stands in an object as it is. json.RawMessage would be compacted and escaped.
type raw []byte

// object is a JSON object of names and values in turn.
func object(pairs ...any) []byte {
	b := []byte{'{'}
	for i := 0; i < len(pairs); i += 2 {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendJSON(b, pairs[i]), ':')
		if v, ok := pairs[i+1].(raw); ok {
			b = append(b, v...)
		} else {
			b = appendJSON(b, pairs[i+1])
		}
	}
	return append(b, '}')
}

// appendJSON writes v without the escapes that json.Marshal adds for HTML, and with those that it leaves out: DEL, the control
// characters from U+0080, some of which begin an escape sequence as ESC [ does, and those that turn the direction of writing.
func appendJSON(b []byte, v any) []byte {
	w := bytes.NewBuffer(nil)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic(err) // strings, numbers and structs of them always can be
	}
	for _, r := range string(w.Bytes()[:w.Len()-1]) { // without Encode's newline; always UTF-8
		if r >= 0x7f && r < 0xa0 || unicode.Is(unicode.Bidi_Control, r) {
			b = fmt.Appendf(b, `\u%04x`, r)
		} else {
			b = utf8.AppendRune(b, r)
		}
	}
	return b
}

// printJSON prints one value: as it is for json, on one line for jsonl.
func (a *App) printJSON(value []byte) error {
	if a.output == "jsonl" {
		return a.printLine(value)
	}
	_, err := a.Stdout.Write(append(value, '\n'))
	return err
}

// printLine prints one value on one line. Between tokens, where alone JSON allows line ends, a space means the same.
func (a *App) printLine(value []byte) error {
	for i, c := range value {
		if c == '\n' || c == '\r' {
			value[i] = ' '
		}
	}
	_, err := a.Stdout.Write(append(value, '\n'))
	return err
}

// list prints values as they come: an array for json, lines for jsonl.
type list struct {
	app *App
	n   int
}

func (l *list) add(value []byte) error {
	l.n++
	if l.app.output == "jsonl" {
		return l.app.printJSON(value)
	}
	before := ",\n"
	if l.n == 1 {
		before = "["
	}
	_, err := l.app.Stdout.Write(append([]byte(before), value...))
	return err
}

func (l *list) end() error {
	if l.app.output == "jsonl" {
		return nil
	}
	after := "]\n"
	if l.n == 0 {
		after = "[]\n"
	}
	_, err := l.app.Stdout.Write([]byte(after))
	return err
}

// stamp is a time in microseconds as RFC 3339; 0 is "".
func stamp(us int64) string {
	if us == 0 {
		return ""
	}
	return time.UnixMicro(us).UTC().Format("2006-01-02T15:04:05.000000Z07:00")
}

// stampOrNull is stamp for JSON.
func stampOrNull(us int64) any {
	if us == 0 {
		return nil
	}
	return stamp(us)
}

func number(n int64) string { return strconv.FormatInt(n, 10) }

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
