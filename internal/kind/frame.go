package kind

import (
	"encoding/json"
	"fmt"
	"time"

	"postrider/internal/agent"
)

// appendFrame writes the request for one step, a single line. The envelope is written around state and data, because
// json.Marshal would change their bytes (escapes, and numbers if they ever became values).
func appendFrame(b []byte, s agent.Step) []byte {
	b = appendString(append(b, `{"id":`...), s.ID())
	b = appendString(append(b, `,"tenant":`...), s.Tenant)
	b = appendString(append(b, `,"run":`...), s.Run)
	b = appendString(append(b, `,"branch":`...), s.Branch)
	b = appendString(append(b, `,"agent":`...), s.Agent)
	b = fmt.Appendf(b, `,"step":%d,"attempt":%d`, s.Number, s.Attempt)
	b = appendTime(append(b, `,"now":`...), s.Now)
	b = appendTime(append(b, `,"deadline":`...), s.Deadline)
	b = appendRaw(append(b, `,"state":`...), s.State)
	b = append(b, `,"input":`...)
	if in := s.Input; in != nil {
		b = appendString(append(b, `{"id":`...), in.ID)
		b = appendString(append(b, `,"type":`...), in.Type)
		b = appendRaw(append(b, `,"data":`...), in.Data)
		b = appendTime(append(b, `,"at":`...), in.At)
		b = appendString(append(b, `,"source":`...), in.Source)
		b = append(b, '}')
	} else {
		b = append(b, "null"...)
	}
	if s.LastError != "" {
		b = appendString(append(b, `,"last_error":`...), s.LastError)
	}
	return append(b, '}', '\n')
}

func appendString(b []byte, s string) []byte {
	q, _ := json.Marshal(s) // no string fails; invalid UTF-8 was refused at the door
	return append(b, q...)
}

func appendTime(b []byte, t time.Time) []byte {
	return t.UTC().AppendFormat(b, `"2006-01-02T15:04:05.000000Z"`)
}

// appendRaw keeps the bytes, but for CR and LF: JSON allows them only between tokens, and they would end the line.
func appendRaw(b []byte, raw json.RawMessage) []byte {
	if len(raw) == 0 {
		return append(b, "null"...)
	}
	from := len(b)
	b = append(b, raw...)
	for i := from; i < len(b); i++ {
		if b[i] == '\n' || b[i] == '\r' {
			b[i] = ' '
		}
	}
	return b
}
