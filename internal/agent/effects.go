package agent

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// maxItems bounds a list before it is decoded: 32 MiB of "{}," would become gigabytes of Go values. What a step may
// really ask for is far less, and the executor's to decide.
const maxItems = 10_000

// DecodeEffects reads the JSON object that answers a step. It is strict, because a misspelt field would be an intent
// silently lost: unknown and repeated fields, wrong types and trailing bytes are errors that name the field's path.
// State and Data keep the sender's bytes, and share memory with b. Names, sizes and counts are the executor's to check.
func DecodeEffects(b []byte) (Effects, error) {
	var e Effects
	if _, err := document(b, e.fields()); err != nil {
		return Effects{}, fmt.Errorf("effects: %w", err)
	}
	return e, nil
}

// Reply is one line that an agent in another process wrote: a log line when Log is set, else about the step ID, and
// then a heartbeat, its Error, or its Effects.
type Reply struct {
	ID        string
	Log       *string
	Heartbeat bool
	Error     *Error
	Effects   Effects
}

// DecodeReply reads one line, as strictly as DecodeEffects. With an error it still fills in ID if the line has one,
// wherever it stands: that fault belongs to that step, every other one to nobody.
func DecodeReply(b []byte) (Reply, error) {
	var r Reply
	f := r.Effects.fields()
	f["id"] = text(&r.ID)
	f["heartbeat"] = boolean(&r.Heartbeat)
	f["log"] = func(path string, raw json.RawMessage) error {
		r.Log = new(string)
		return text(r.Log)(path, raw)
	}
	f["error"] = func(path string, raw json.RawMessage) (err error) {
		r.Error, err = decodeError(path, raw)
		return err
	}
	seen, err := document(b, f)
	if err == nil {
		err = r.check(seen)
	}
	if err != nil {
		return Reply{ID: r.ID}, err
	}
	return r, nil
}

func (r *Reply) check(seen map[string]bool) error {
	switch {
	case seen["log"] && len(seen) > 1:
		return errors.New("log: stands alone")
	case seen["log"]:
		return nil
	case r.ID == "":
		return errors.New("id: missing")
	case seen["heartbeat"] && (!r.Heartbeat || len(seen) > 2):
		return errors.New("heartbeat: is true and stands alone with its id")
	case seen["error"] && len(seen) > 2:
		return errors.New("error: stands alone with its id")
	}
	return nil
}

func (e *Effects) fields() fields {
	return fields{
		"state":    verbatim(&e.State),
		"events":   list(&e.Events, decodeEvent),
		"commands": list(&e.Commands, decodeCommand),
		"messages": list(&e.Messages, decodeMessage),
		"cancel":   list(&e.Cancel, decodeString),
		"next": func(path string, raw json.RawMessage) error {
			s, err := decodeString(path, raw)
			if err != nil {
				return err
			}
			switch e.Next = Next(s); e.Next {
			case Wait, Continue, Done, Fail:
				return nil
			}
			return fmt.Errorf("%s: want wait, continue, done or fail, not %s", path, quote(s))
		},
	}
}

func decodeEvent(path string, raw json.RawMessage) (e Event, err error) {
	_, err = object(path, raw, fields{
		"type":    text(&e.Type),
		"data":    verbatim(&e.Data),
		"subject": text(&e.Subject),
	})
	return e, err
}

func decodeCommand(path string, raw json.RawMessage) (c Command, err error) {
	seen, err := object(path, raw, fields{
		"agent":      text(&c.Agent),
		"run":        text(&c.Run),
		"type":       text(&c.Type),
		"id":         text(&c.ID),
		"data":       verbatim(&c.Data),
		"in":         duration(&c.In, 0),
		"at":         instant(&c.At),
		"expires_in": duration(&c.ExpiresIn, 1),
	})
	if err == nil && seen["in"] && seen["at"] {
		err = fmt.Errorf("%s: in and at exclude each other", path)
	}
	return c, err
}

func decodeMessage(path string, raw json.RawMessage) (m Message, err error) {
	var data json.RawMessage
	var plain, encoded string
	seen, err := object(path, raw, fields{
		"topic":      text(&m.Topic),
		"data":       verbatim(&data),
		"text":       text(&plain),
		"base64":     text(&encoded),
		"retain":     boolean(&m.Retain),
		"expires_in": duration(&m.ExpiresIn, 1),
	})
	if err != nil {
		return m, err
	}
	switch [3]bool{seen["data"], seen["text"], seen["base64"]} {
	case [3]bool{true, false, false}:
		m.Payload = data
	case [3]bool{false, true, false}:
		m.Payload = []byte(plain)
	case [3]bool{false, false, true}:
		if m.Payload, err = base64.StdEncoding.Strict().DecodeString(encoded); err != nil {
			err = fmt.Errorf("%s.base64: %w", path, err)
		}
	default:
		err = fmt.Errorf("%s: needs exactly one of data, text, base64", path)
	}
	return m, err
}

func decodeError(path string, raw json.RawMessage) (*Error, error) {
	var e Error
	var code string
	seen, err := object(path, raw, fields{
		"code":        text(&code),
		"message":     text(&e.Message),
		"retry_after": duration(&e.RetryAfter, 0),
	})
	if err != nil {
		return nil, err
	}
	switch e.Code = Code(code); e.Code {
	case Retryable, Terminal, Busy:
	default:
		return nil, fmt.Errorf("%s.code: want retryable, terminal or busy, not %s", path, quote(code))
	}
	if seen["retry_after"] && e.Code != Busy {
		return nil, fmt.Errorf("%s.retry_after: only with busy", path)
	}
	return &e, nil
}

// A field reads the value found at path into the variable it was made for. The value is valid JSON without white space
// around it.
type field func(path string, raw json.RawMessage) error

type fields map[string]field

func verbatim(to *json.RawMessage) field {
	return func(_ string, raw json.RawMessage) error { *to = raw; return nil }
}

func text(to *string) field {
	return func(path string, raw json.RawMessage) (err error) {
		*to, err = decodeString(path, raw)
		return err
	}
}

func boolean(to *bool) field {
	return func(path string, raw json.RawMessage) error {
		if c := raw[0]; c != 't' && c != 'f' {
			return wrongType(path, "true or false", raw)
		}
		*to = raw[0] == 't'
		return nil
	}
}

func duration(to *time.Duration, least time.Duration) field {
	return func(path string, raw json.RawMessage) error {
		s, err := decodeString(path, raw)
		if err != nil {
			return err
		}
		if *to, err = time.ParseDuration(s); err != nil {
			return fmt.Errorf("%s: want a duration such as 90s or 5m, not %s%s", path, quote(s), unitless(s))
		}
		if *to < least {
			return fmt.Errorf("%s: %s is too short", path, s)
		}
		return nil
	}
}

// rfc3339 is the grammar; time.Parse alone takes also one-digit hours, a comma, and offsets of a day and more.
var rfc3339 = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)$`)

func instant(to *time.Time) field {
	return func(path string, raw json.RawMessage) error {
		if c := raw[0]; c == '-' || '0' <= c && c <= '9' {
			return fmt.Errorf("%s: want a string such as \"2026-01-31T12:00:00Z\", not the number %s%s", path, raw[:min(len(raw), maxQuote)], epochal(string(raw)))
		}
		s, err := decodeString(path, raw)
		if err != nil {
			return err
		}
		if *to, err = ParseTime(s); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		return nil
	}
}

// ParseTime reads a time as agents and senders give it: RFC 3339, in a year from 1970 to 9999, UTC.
func ParseTime(s string) (time.Time, error) {
	t, err := time.Parse(time.RFC3339, s)
	if err != nil || !rfc3339.MatchString(s) {
		return time.Time{}, fmt.Errorf("want RFC 3339 such as 2026-01-31T12:00:00Z, not %s%s", quote(s), epochal(s))
	}
	t = t.UTC()
	if y := t.Year(); y < 1970 || y > 9999 {
		return time.Time{}, fmt.Errorf("year %d is outside 1970 to 9999", y)
	}
	return t, nil
}

// epochal says what a number in the place of a time probably is; "" where it can be anything.
func epochal(s string) string {
	n, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return ""
	}
	for _, unit := range []string{"seconds", "milliseconds", "microseconds", "nanoseconds"} {
		if n >= 946684800 && n < 4102444800 { // from 2000 to 2100
			return fmt.Sprintf(", which looks like the %s from 1970 to %s", unit, time.Unix(int64(n), 0).UTC().Format(time.RFC3339))
		}
		n /= 1000
	}
	return ""
}

func unitless(s string) string {
	if _, err := strconv.ParseFloat(s, 64); err != nil {
		return ""
	}
	return ", a number without a unit"
}

func list[T any](to *[]T, one func(path string, raw json.RawMessage) (T, error)) field {
	return func(path string, raw json.RawMessage) error {
		if string(raw) == "null" { // how many writers say that a list is empty
			return nil
		}
		if raw[0] != '[' {
			return wrongType(path, "an array", raw)
		}
		for part := range parts(raw) {
			if len(*to) == maxItems {
				return fmt.Errorf("%s: more than %d items", path, maxItems)
			}
			v, err := one(fmt.Sprintf("%s[%d]", path, len(*to)), part)
			if err != nil {
				return err
			}
			*to = append(*to, v)
		}
		return nil
	}
}

// document reads a whole input that has to be one object.
func document(b []byte, f fields) (seen map[string]bool, err error) {
	if !utf8.Valid(b) {
		return nil, errors.New("not UTF-8")
	}
	if !json.Valid(b) {
		return nil, fmt.Errorf("not JSON: %w", json.Unmarshal(b, new(json.RawMessage)))
	}
	return object("", bytes.TrimSpace(b), f)
}

// object reads every member even after a fault, so that DecodeReply learns the id, and returns the first fault.
func object(path string, raw json.RawMessage, f fields) (seen map[string]bool, err error) {
	if raw[0] != '{' {
		return nil, wrongType(path, "an object", raw)
	}
	seen = make(map[string]bool)
	for part := range parts(raw) {
		end := endOfString(part, 0) + 1
		var key string
		if err := json.Unmarshal(part[:end], &key); err != nil {
			return nil, err // cannot be: part is valid JSON
		}
		at := join(path, key)
		set, known := f[key]
		var fault error
		switch {
		case !known:
			fault = fmt.Errorf("%s: unknown field", at)
		case seen[key]:
			fault = fmt.Errorf("%s: given twice", at)
		default:
			seen[key] = true
			colon := end + bytes.IndexByte(part[end:], ':')
			fault = set(at, bytes.TrimSpace(part[colon+1:]))
		}
		if err == nil {
			err = fault
		}
	}
	return seen, err
}

// parts yields what stands between the commas of an array or object, trimmed. It relies on raw being valid JSON.
func parts(raw json.RawMessage) iter.Seq[json.RawMessage] {
	return func(yield func(json.RawMessage) bool) {
		start, depth := 1, 0
		for i := 1; i < len(raw); i++ {
			switch c := raw[i]; {
			case c == '"':
				i = endOfString(raw, i)
			case c == '{' || c == '[':
				depth++
			case depth > 0 && (c == '}' || c == ']'):
				depth--
			case depth == 0 && (c == ',' || c == '}' || c == ']'):
				part := bytes.TrimSpace(raw[start:i])
				if len(part) > 0 && !yield(part) {
					return
				}
				start = i + 1
			}
		}
	}
}

// endOfString returns the place of the quote that closes the one at i.
func endOfString(raw json.RawMessage, i int) int {
	for i++; raw[i] != '"'; i++ {
		if raw[i] == '\\' {
			i++
		}
	}
	return i
}

// decodeString refuses lone surrogates, which UTF-8 cannot hold: encoding/json would replace them in silence.
func decodeString(path string, raw json.RawMessage) (s string, err error) {
	if raw[0] != '"' {
		return "", wrongType(path, "a string", raw)
	}
	for i := 0; i < len(raw); i++ {
		if raw[i] != '\\' {
			continue
		}
		if i++; raw[i] != 'u' {
			continue
		}
		r := hex4(raw[i+1:])
		if i += 4; !utf16.IsSurrogate(r) {
			continue
		}
		rest := raw[i+1:]
		if !bytes.HasPrefix(rest, []byte(`\u`)) || utf16.DecodeRune(r, hex4(rest[2:])) == unicode.ReplacementChar {
			return "", fmt.Errorf("%s: lone surrogate \\u%04x", path, r)
		}
		i += 6
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	return s, nil
}

func hex4(b []byte) rune {
	n, _ := strconv.ParseUint(string(b[:4]), 16, 32) // four hex digits, because raw is valid JSON
	return rune(n)
}

func wrongType(path, want string, raw json.RawMessage) error {
	got := "a number"
	switch raw[0] {
	case '{':
		got = "an object"
	case '[':
		got = "an array"
	case '"':
		got = "a string"
	case 't', 'f':
		got = string(raw)
	case 'n':
		got = "null"
	}
	if path == "" {
		return fmt.Errorf("want %s, not %s", want, got)
	}
	return fmt.Errorf("%s: want %s, not %s", path, want, got)
}

func join(path, key string) string {
	odd := func(r rune) bool { return r == '.' || r == '[' || r == '"' || !unicode.IsPrint(r) }
	if key == "" || len(key) > maxQuote || strings.ContainsFunc(key, odd) {
		key = quote(key)
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

const maxQuote = 64

// quote makes an agent's text fit for an error message.
func quote(s string) string {
	if len(s) > maxQuote {
		return strconv.Quote(s[:maxQuote]) + "…"
	}
	return strconv.Quote(s)
}
